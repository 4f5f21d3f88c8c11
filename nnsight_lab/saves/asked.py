"""What was asked for by name, of a store or of a file alike.

Both are asked in the same words: ``get("hidden")`` where there is one request, ``get("lab-1", "hidden")`` or
``get("hidden", request_id="lab-1")`` where there are several. Which of several is meant is never guessed: the
newest is somebody's, and a wrong tensor is worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nnsight_lab.errors import CellUsageError, SaveNotFound


class Asked(NamedTuple):
    """One save by name.

    Attributes:
        request_id: Of which request; None for the only one.
        name: The name it was saved under.
        block: Which block saved it, where that was said.
    """

    request_id: str | None
    name: str
    block: str | None


def asked(which: Sequence[str], request_id: str | None, block: str | None) -> Asked:
    """The save that the arguments of a ``get`` name.

    Raises:
        CellUsageError: They are not a name, or a request and a name.
    """
    words = list(which)
    if not words or not all(isinstance(word, str) for word in words):
        raise CellUsageError(
            'say which save: get("hidden"), or get(request_id, "hidden") where there are several requests'
        )
    if request_id is None and len(words) > 1:
        request_id = words.pop(0)
    if len(words) > 1 and block is None:
        block = words.pop(1)
    if len(words) > 1:
        raise CellUsageError(
            f"{', '.join(map(repr, words[1:]))} is too much: a save is named by its request, name and block"
        )
    return Asked(request_id, words[0], block)


def only_of(requests: Sequence[str], where: str) -> str:
    """The one request there is.

    Raises:
        SaveNotFound: There is none, or there are several.
    """
    if len(requests) == 1:
        return requests[0]
    if not requests:
        raise SaveNotFound(f"{where} has no requests.")
    raise SaveNotFound(f"{where} has {len(requests):,} requests: say which (request_id={requests[0]!r}, …).")

"""Answers of several workers to one question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_lab.wire.codec import decode, encode


def told_first(answers: Sequence[bytes]) -> bytes:
    """The answer of the first worker that has one; of a pipeline only the last stage may have it.

    Args:
        answers: The codec's bytes, of each rank. One that refuses says so in ``refused``; one that has
            nothing to tell is empty.
    """
    first = bytes(answers[0])
    for answer in answers if len(answers) > 1 else ():
        found: Any = decode(answer)
        if found and "refused" not in found:
            return bytes(answer)
    return first


def told_together(answers: Sequence[bytes]) -> bytes:
    """What all workers tell of a request's lists, by block and name; of one list the first worker's.

    Args:
        answers: As of `nnsight_lab.worker.peeking.peek`, of each rank.
    """
    if len(answers) == 1:
        return bytes(answers[0])
    found: list[dict[str, dict[str, Any]]] = [decode(answer) for answer in answers]
    told = [one for one in found if "refused" not in one]
    if not told:
        return bytes(answers[0])
    blocks = {block: None for one in told for block in one}
    return encode({block: _first_of([one.get(block, {}) for one in told]) for block in blocks})


def _first_of(lists: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for one in reversed(lists) for name, value in one.items()}

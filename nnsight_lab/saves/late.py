"""A block's saves that are taken apart when somebody first looks at one of them.

What they are called is known at once, and their memory is held. Of a hundred requests whose lists have a
value for each token, thousands of tensors would be made before the caller gets his outputs, most to be looked
at one request at a time, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_lock = threading.RLock()


class Late(Mapping[str, Any]):
    """Values by name; the same objects however often they are asked for.

    Args:
        names: What they are called, in their order.
        make: Gives them.
    """

    __slots__ = ("_make", "_names", "_values")

    def __init__(self, names: Collection[str], make: Callable[[], dict[str, Any]]) -> None:
        self._names = names
        self._make: Callable[[], dict[str, Any]] | None = make
        self._values: dict[str, Any] | None = None

    def made(self) -> dict[str, Any]:
        """The values."""
        if self._values is None:
            with _lock:
                if self._values is None:
                    assert self._make is not None
                    values = self._values = self._make()
                    self._make = None
                    return values
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self.made()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return repr(self.made())

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.made(),)

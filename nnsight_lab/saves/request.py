"""What the blocks of one request saved, read by name.

Two edits, or an edit and a trace, may use one name for different things. nnsight lets the later one
win without a word; here both are kept, a name that is not ambiguous is read directly, and one that
is raises an error that says how to read each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nnsight_lab.errors import AmbiguousSave, SaveNotFound, nearest
from nnsight_lab.saves.late import Late
from nnsight_lab.wire.keys import TRACE_BLOCK


class Saves(Mapping[str, Any]):
    """The saves of one sequence of one request.

    ``saves["hidden"]`` where one block saved that name; ``saves.edit("probe")["hidden"]`` and
    ``saves.trace["hidden"]`` always.
    """

    def __init__(self, blocks: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._blocks: dict[str, Mapping[str, Any]] = {
            name: values if type(values) is Late else dict(values) for name, values in (blocks or {}).items()
        }

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that ran, in order: edits by name, then ``"trace"`` where there was one."""
        return tuple(self._blocks)

    @property
    def trace(self) -> Mapping[str, Any]:
        """What the trace's own block saved."""
        return self._blocks.get(TRACE_BLOCK, {})

    def edit(self, name: str) -> Mapping[str, Any]:
        """What the edit ``name`` saved.

        Raises:
            SaveNotFound: When that edit did not run on this request.
        """
        if name not in self._blocks:
            ran = [block for block in self._blocks if block != TRACE_BLOCK]
            raise SaveNotFound(f"Edit {name!r} did not run on this request.{nearest(name, ran)}")
        return self._blocks[name]

    def __getitem__(self, name: str) -> Any:
        holders = [block for block, values in self._blocks.items() if name in values]
        if not holders:
            raise SaveNotFound(f"Nothing was saved as {name!r}.{nearest(name, self)}")
        if len(holders) > 1:
            ways = " or ".join(
                f"saves.trace[{name!r}]" if block == TRACE_BLOCK else f"saves.edit({block!r})[{name!r}]"
                for block in holders
            )
            raise AmbiguousSave(f"{name!r} was saved by {len(holders)} blocks: read {ways}.")
        return self._blocks[holders[0]][name]

    def __contains__(self, name: object) -> bool:
        # Not the Mapping's own, nor its `get`: to those an ambiguous name is one that is not there.
        return any(name in values for values in self._blocks.values())

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` where nobody saved that name; `AmbiguousSave` where two did."""
        if name not in self:
            return default
        return self[name]

    def __iter__(self) -> Iterator[str]:
        seen: dict[str, None] = {}
        for values in self._blocks.values():
            seen.update(dict.fromkeys(values))
        return iter(seen)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        parts = [f"{block}: {', '.join(values) or 'nothing'}" for block, values in self._blocks.items()]
        return f"<Saves {'; '.join(parts) or 'nothing'}>"

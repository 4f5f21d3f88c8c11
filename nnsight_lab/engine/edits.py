"""The edits of an engine: named, versioned, switched on and off, replaced without disturbing anyone.

nnsight keeps every registration it is given, runs unnamed ones on everybody's requests, and lets
two of one name run both. Here an edit has one name and one current version; re-running its cell
makes the next version, requests in flight keep theirs, and an old version leaves the workers when
the last request that runs it is home.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_lab.errors import EditRefused, UnknownEdit, nearest
from nnsight_lab.wire.keys import CLEAR, REGISTER, TRACE_BLOCK
from nnsight_lab.wire.touch import UNKNOWN, Touch

if TYPE_CHECKING:
    from nnsight_lab.engine.life import EngineLife


class Cell(NamedTuple):
    """The notebook cell that left an edit; empty where there is none.

    Attributes:
        id: As the notebook has it.
        source: The whole cell, as it was run.
    """

    id: str = ""
    source: str = ""


#: Tells the cell that is being run; the notebook's extension puts its own here.
current_cell: Callable[[], Cell] = Cell

_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,99}")


@dataclass(eq=False)
class EditVersion:
    """One version of an edit, as it is installed in the workers.

    Attributes:
        number: As `Edit.version` was when it was installed; 0 for a trace's block over many prompts.
        source: The block as it was written.
        roots: Its names that are modules of the model.
        method: What installs it in a worker: one for code, one for data.
        touch: What of a prompt it touches.
    """

    name: str
    payload: bytes
    source: str = ""
    roots: tuple[tuple[str, str], ...] = ()
    method: str = REGISTER
    touch: Touch = UNKNOWN
    number: int = 0
    id: str = field(default_factory=lambda: f"edit-{uuid.uuid4().hex[:12]}")
    wants_result: bool = False
    in_flight: int = 0
    retired: bool = False


@dataclass(eq=False)
class Edit:
    """A block that stays on the engine and runs for every request that asks for it.

    Attributes:
        name: What requests call it by.
        version: 1 when first installed, one more each time its cell is run again.
        on: Whether requests that name no edits run it.
        source: The block as it was written.
        previous_source: That of the version before; "" where there is none.
        cell: The cell it came from.
        hits: How many requests ran it (this version and earlier ones).
        errors: How many of them it failed.
        last_error: The last failure, in one line.
        cleared: Whether it is gone.
    """

    name: str
    engine: EngineLife
    version: int = 0
    on: bool = True
    source: str = ""
    previous_source: str = ""
    cell: Cell = field(default_factory=Cell)
    hits: int = 0
    errors: int = 0
    last_error: str = ""
    cleared: bool = False
    _current: EditVersion | None = None

    def switch_on(self) -> None:
        """Run it again for requests that name no edits."""
        self.on = True

    def switch_off(self) -> None:
        """Run it only for requests that name it."""
        self.on = False

    def clear(self) -> None:
        """Take it off the engine; a second time is harmless."""
        if not self.cleared:
            self.engine.edits.clear(self.name)

    async def aclear(self) -> None:
        """`clear`, awaited."""
        if not self.cleared:
            await self.engine.edits.aclear(self.name)

    def __repr__(self) -> str:
        state = "cleared" if self.cleared else "on" if self.on else "off"
        return f"<Edit {self.name!r} version {self.version} ({state})>"


class Edits:
    """The edits of one engine, in the order they run."""

    def __init__(self, engine: EngineLife) -> None:
        self._engine = engine
        self._edits: dict[str, Edit] = {}
        self._lock = threading.Lock()
        self._default: tuple[str, ...] | None = None

    # -- reading -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Edit]:
        return iter(list(self._edits.values()))

    def __len__(self) -> int:
        return len(self._edits)

    def __contains__(self, name: object) -> bool:
        return name in self._edits

    def __getitem__(self, name: str) -> Edit:
        edit = self._edits.get(name)
        if edit is None:
            raise UnknownEdit(
                f"No edit is called {name!r}.{nearest(name, self._edits) or ' None is installed.'}"
            )
        return edit

    def __repr__(self) -> str:
        return f"<Edits {', '.join(repr(e) for e in self) or 'none'}>"

    def chosen(self, names: Iterable[str] | None) -> tuple[EditVersion, ...]:
        """The versions a request runs: those named, in that order; else the defaults, else all that are on.

        Raises:
            UnknownEdit: For a name nothing is installed under, a default's too.
            EditRefused: When ``names`` is a string, or names one twice.
        """
        if isinstance(names, str):
            raise EditRefused(f"edits= takes a list of names: write edits=[{names!r}].")
        if names is None and self._default is not None:
            self._refuse_missing()
            names = self._default
        if names is None:
            return tuple(e._current for e in self if e.on and e._current is not None)
        listed = _listed(names, "edits")
        return tuple(v for v in (self[name]._current for name in listed) if v is not None)

    # -- the defaults --------------------------------------------------------------------------

    @property
    def default(self) -> tuple[str, ...] | None:
        """The names that requests run which name none themselves; None where all run that are on.

        A name may be set before its edit is installed: until then such requests are refused, and the
        message says what to do. It lives through a restart of the engine.
        """
        return self._default

    @default.setter
    def default(self, names: Iterable[str] | None) -> None:
        if isinstance(names, str):
            raise EditRefused(f"default_edits takes a list of names, or None: [{names!r}].")
        self._default = None if names is None else tuple(_listed(names, "default_edits"))

    def missing(self) -> list[str]:
        """Defaults that are not installed."""
        return [name for name in self._default or () if name not in self._edits]

    def by_default(self, edit: Edit) -> bool:
        """Whether requests that name no edits run it."""
        return edit.on if self._default is None else edit.name in self._default

    def standing(self, edit: Edit) -> str:
        """That in a word."""
        if self._default is None:
            return "on" if edit.on else "off"
        return "default" if edit.name in self._default else "not a default"

    def _refuse_missing(self) -> None:
        missing = self.missing()
        if missing:
            raise UnknownEdit(
                f"{missing[0]!r}, a default of this notebook, is not installed yet: run its cell, name "
                "edits=[…] for this request, or take the choice back with `%edits default all`."
            )

    # -- changing ------------------------------------------------------------------------------

    def declared(self, name: Any) -> Edit:
        """The edit of that name, or a new one that is not installed yet.

        Raises:
            EditRefused: When the name cannot be one.
        """
        if not named_well(name):
            raise EditRefused(
                f"An edit needs a name, of letters, digits, '_', '-' and '.': `%%edit probe`, not {name!r}."
            )
        if name == TRACE_BLOCK:
            raise EditRefused(
                f"An edit cannot be called {TRACE_BLOCK!r}: a trace's own saves go by that name."
            )
        known = self._edits.get(name)
        return known if known is not None else Edit(name, self._engine)

    def install_steps(
        self, edit: Edit, version: EditVersion, source: str
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The worker calls that make ``version`` current; what must follow each happens between them."""
        yield version.method, (version.id, version.payload, version.name)
        with self._lock:
            old, edit._current = edit._current, version
            edit.version += 1
            version.number = edit.version
            edit.previous_source, edit.source = edit.source, source
            edit.cell = current_cell()
            edit.cleared = False
            self._edits[edit.name] = edit
        yield from self._retire([old] if old is not None else [])

    def clear(self, *names: str) -> None:
        """Clear the edits named; or all of them, and the choice of defaults with them."""
        for method, args in self._clear_steps(names):
            self._engine.rpc(method, *args)

    async def aclear(self, *names: str) -> None:
        """`clear`, awaited."""
        for method, args in self._clear_steps(names):
            await self._engine.arpc(method, *args)

    def _clear_steps(self, names: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        edits = [self[name] for name in names] if names else list(self)
        if not names:
            self._default = None
        versions = []
        with self._lock:
            for edit in edits:
                self._edits.pop(edit.name, None)
                edit.cleared = True
                if edit._current is not None:
                    versions.append(edit._current)
                    edit._current = None
        yield from self._retire(versions)

    def _retire(self, versions: Sequence[EditVersion]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        with self._lock:
            for version in versions:
                version.retired = True
            gone = [version.id for version in versions if version.in_flight == 0]
        if gone and self._engine.alive:
            yield CLEAR, (gone,)

    # -- requests ------------------------------------------------------------------------------

    def hold(self, versions: Iterable[EditVersion]) -> None:
        """A request with these versions is about to be submitted."""
        with self._lock:
            for version in versions:
                version.in_flight += 1

    def let_go(self, versions: Iterable[EditVersion]) -> list[str]:
        """That request is over; returns the ids of retired versions nobody runs any more."""
        with self._lock:
            gone = []
            for version in versions:
                version.in_flight -= 1
                if version.retired and version.in_flight == 0:
                    gone.append(version.id)
            return gone

    def count(self, name: str, error: str | None) -> None:
        """Note that a request ran the edit, and whether it failed."""
        edit = self._edits.get(name)
        if edit is not None:
            edit.hits += 1
            if error is not None:
                edit.errors += 1
                edit.last_error = error

    def adopt(self, others: Edits) -> None:
        """Take over the edits of the engine this one replaces, and which of them are the defaults."""
        self._default = others._default
        for edit in others:
            edit.engine = self._engine
            self._edits[edit.name] = edit

    def installed(self) -> list[EditVersion]:
        """The current versions, to install again on a restarted engine."""
        return [e._current for e in self if e._current is not None]

    def reinstall_steps(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The worker calls that put every current version on a fresh engine."""
        for version in self.installed():
            version.in_flight = 0
            yield version.method, (version.id, version.payload, version.name)


def named_well(name: object) -> bool:
    """Whether an edit can be called so."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _listed(names: Any, what: str) -> list[str]:
    """A list of names, each once.

    Raises:
        EditRefused: It is none.
    """
    if not isinstance(names, list | tuple):
        raise EditRefused(
            f"{what}= takes a list of names, in the order they run, not {type(names).__name__}."
        )
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise EditRefused(f"{what}= takes a list of names, not {type(name).__name__}s.")
    if len(set(listed)) < len(listed):
        raise EditRefused(f"{what}={listed!r} names an edit twice; each runs once.")
    return listed

"""What this room asks of the engine side, as protocols.

The magics are written against these few names and nothing else, so that loading the extension loads
neither torch nor vLLM, and a fake engine of fifty lines can stand in for a real one in every test here.
The package itself is reached through `lab()`, when a line runs and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from nnsight_lab.errors import EngineNotStarted


class Progress(Protocol):
    """How far one request is."""

    @property
    def index(self) -> int: ...
    @property
    def prompt(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def finished(self) -> bool: ...


class StartProgress(Protocol):
    """How far an engine's start is.

    Attributes:
        phase: What it is doing now.
        elapsed_s: Seconds since the start began.
        done: The phases behind it, each with the seconds it took.
    """

    @property
    def phase(self) -> str: ...
    @property
    def elapsed_s(self) -> float: ...
    @property
    def done(self) -> Sequence[tuple[str, float]]: ...


class Edit(Protocol):
    """An installed edit."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def on(self) -> bool: ...
    @property
    def hits(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def last_error(self) -> object: ...
    def switch_on(self) -> object: ...
    def switch_off(self) -> object: ...
    def clear(self) -> object: ...


class Edits(Protocol):
    """The edits of one engine."""

    def __iter__(self) -> Iterator[Edit]: ...
    def __getitem__(self, name: str, /) -> Edit: ...
    def clear(self) -> object: ...
    def missing(self) -> list[str]: ...
    def standing(self, edit: Any, /) -> str: ...
    @property
    def default(self) -> Any: ...
    @default.setter
    def default(self, names: Sequence[str] | None, /) -> None: ...


class Saves(Protocol):
    """The saves of an engine's requests."""

    def __len__(self) -> int: ...
    def ids(self) -> list[str]: ...
    def rows(self, most: int = ...) -> tuple[Sequence[Sequence[str]], str]: ...
    def write(self, path: str, requests: Sequence[str] | None = None) -> object: ...
    def adopt(self, file: Any) -> Sequence[object]: ...
    def keep(self, request_id: str, on: bool = True) -> None: ...
    def drop(self, what: Any) -> None: ...
    def clear(self) -> None: ...


class Log(Protocol):
    """An engine's log file."""

    @property
    def path(self) -> object: ...
    def tail(self, lines: int = 40) -> str: ...


class Status(Protocol):
    """What an engine is doing; its text is a readable table."""

    @property
    def state(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def up_s(self) -> float: ...
    def rows(self) -> Sequence[tuple[str, str]]: ...


class Engine(Protocol):
    """A live engine."""

    @property
    def name(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def model(self) -> Any: ...
    @property
    def already_running(self) -> bool: ...
    @property
    def log(self) -> Log: ...
    @property
    def edits(self) -> Edits: ...
    @property
    def saves(self) -> Saves: ...
    def status(self) -> Status: ...
    def sleep(self) -> object: ...
    def wake(self) -> object: ...
    def trace(self, *prompts: Any, **options: Any) -> Any: ...
    def edit(self, *name: Any, **options: Any) -> Any: ...


StartWatcher = Callable[[StartProgress], object]


class Lab(Protocol):
    """The package's front door."""

    def start(
        self,
        model: str,
        *,
        name: str = ...,
        mode: str = ...,
        restart: bool = ...,
        progress: StartWatcher | None = ...,
        **options: Any,
    ) -> Engine: ...
    def get_engine(self, name: str | None = None) -> Engine: ...
    def engines(self) -> Mapping[str, Engine]: ...
    def read(self, path: str) -> Any: ...
    def stop(self, name: str | None = None) -> object: ...
    def restart(self, name: str | None = None, progress: StartWatcher | None = None) -> Engine: ...


def lab() -> Lab:
    """The package, imported when first asked for: it imports this room, not the other way round."""
    return cast(Lab, importlib.import_module("nnsight_lab"))


def chosen_engine(name: str | None = None) -> Engine:
    """The engine of that name, or the current one.

    Raises:
        EngineNotStarted: There is none. Said here when no engine was ever started, since asking the package
            imports torch and vLLM, which takes seconds.
    """
    package = lab()
    if not package.engines():
        raise EngineNotStarted("No engine is running. Start one, for example: %engine start demo")
    return package.get_engine(name)


def current_mode() -> str:
    """The current engine's mode, `"sync"` when there is none. Called for every cell: cheap."""
    package = lab()
    if not package.engines():
        return "sync"
    try:
        return package.get_engine().mode
    except Exception:  # a dead or half-started engine must not stop cells from being read
        return "sync"

"""A stand-in for the engine side, faithful where the magics lean on it.

It captures a block the way nnsight does (source from `linecache`, the `with` at the frame's line, the body
skipped by a trace hook, saved names pushed into the frame), and runs it in place. `.save()` is a function
here: `save(x)`. Used in the tests' own process and inside real kernels, so it imports nothing but
Python when it is loaded.
"""

from __future__ import annotations

import ast
import ctypes
import linecache
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any

import nnsight_lab
from nnsight_lab.engine.status import EngineStatus, StartProgress, StopReport
from nnsight_lab.errors import EngineNotStarted, EngineStartFailed, UnknownEdit, nearest

_saved: set[int] = set()


def save(value: Any) -> Any:
    """Marks a value to be bound after the block."""
    _saved.add(id(value))
    return value


@dataclass(frozen=True)
class Progress:
    index: int
    prompt: str
    text: str
    tokens: int
    finished: bool


@dataclass
class Completion:
    text: str


@dataclass
class RequestOutput:
    prompt: str
    outputs: list[Completion]


class _Skip(Exception):
    def __init__(self, displaced: Any) -> None:
        self.displaced = displaced


class Block:
    """A `with` block that is captured and not run inline, in sync and async form."""

    kinds: list[str] = []

    def __init__(self) -> None:
        self.source = ""
        self._frame: FrameType | None = None
        self._code: Any = None

    def __enter__(self) -> Any:
        self._capture(sys._getframe(1))
        return self.target()

    def __aenter__(self) -> Any:
        self._capture(sys._getframe(1))

        async def entered() -> Any:
            return self.target()

        return entered()

    def target(self) -> Any:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        if kind is _Skip:
            sys.settrace(value.displaced)
        elif kind is not None:
            return False
        self.run()
        self._frame = None
        return True

    async def __aexit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        return self.__exit__(kind, value, traceback)

    def run(self) -> None:
        raise NotImplementedError

    def _capture(self, frame: FrameType) -> None:
        source = "".join(linecache.getlines(frame.f_code.co_filename))
        nodes = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.With | ast.AsyncWith)
            and frame.f_lineno in (node.lineno, *(item.context_expr.lineno for item in node.items))
        ]
        if not nodes:
            raise RuntimeError(f"no `with` at line {frame.f_lineno} of {frame.f_code.co_filename}")
        node = nodes[-1]
        if isinstance(node.body[0], ast.Try):
            raise ValueError("a block cannot start with `try:`")
        self.kinds.append(type(node).__name__)
        self.source = ast.unparse(ast.Module(node.body, []))
        self._frame = frame
        self._code = compile(ast.Module(node.body, []), frame.f_code.co_filename, "exec")
        first, displaced = node.body[0].lineno, sys.gettrace()
        if all(isinstance(line, ast.Pass) for line in node.body):
            return

        def skip(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_lineno < first:
                return skip
            raise _Skip(displaced)

        sys.settrace(lambda *_: None)
        frame.f_trace = skip

    def execute(self) -> None:
        frame = self._frame
        assert frame is not None
        names = {**frame.f_globals, **frame.f_locals}
        exec(self._code, names)
        found = {name: value for name, value in names.items() if id(value) in _saved and name != "tracer"}
        _saved.clear()
        frame.f_locals.update(found)
        if sys.version_info < (3, 13):
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(1))


class Tracer(Block):
    """What `engine.trace` returns."""

    def __init__(self, engine: Engine, prompts: list[str], watch: Any, sampling: dict[str, Any]) -> None:
        super().__init__()
        self.engine = engine
        self.prompts = prompts
        self.watch = watch
        self.sampling = sampling
        self.outputs: list[RequestOutput] = []
        self.invoked: list[Any] = []
        self.hint: Callable[[str], object] | None = None
        self.estimating = bool(sampling.pop("estimate", False))
        self.estimate: str | None = None

    def __enter__(self) -> Tracer:
        self._capture(sys._getframe(1))
        return self

    def stop(self) -> None:
        """Ends the forward pass here."""

    def invoke(self, *prompts: Any) -> Any:
        self.invoked.append(prompts)
        return _Plain()

    def run(self) -> None:
        if self.estimating:
            self.estimate = f"{len(self.prompts)} prompts: 1.00 MB\nhidden (1.00 MB)"
            return
        self.execute()
        for line in self.engine.hints:
            assert self.hint is not None
            self.hint(line)
        self.engine.calls.append((self.prompts, self.sampling))
        tokens = int(self.sampling.get("max_tokens", 3))
        for step in range(1, tokens + 1):
            if self.engine.delay_s:
                time.sleep(self.engine.delay_s)
            text = " tok" * step
            if self.watch is not None:
                self.watch([Progress(i, p, text, step, step == tokens) for i, p in enumerate(self.prompts)])
        self.outputs = [RequestOutput(prompt, [Completion(" tok" * tokens)]) for prompt in self.prompts]


class _Plain:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(eq=False)
class Edit:
    engine: Engine
    name: str
    version: int = 1
    on: bool = True
    source: str = ""
    hits: int = 0
    errors: int = 0
    last_error: str = ""

    def switch_on(self) -> None:
        self.on = True

    def switch_off(self) -> None:
        self.on = False

    def clear(self) -> None:
        del self.engine.edits.known[self.name]


@dataclass
class Edits:
    known: dict[str, Edit] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Edit]:
        return iter(list(self.known.values()))

    def __getitem__(self, name: str) -> Edit:
        if name not in self.known:
            raise UnknownEdit(f"No edit {name!r}.{nearest(name, self.known)}")
        return self.known[name]

    def clear(self) -> None:
        self.known.clear()

    default: Any = None

    def missing(self) -> list[str]:
        return [name for name in self.default or () if name not in self.known]

    def standing(self, edit: Edit) -> str:
        if self.default is None:
            return "on" if edit.on else "off"
        return "default" if edit.name in self.default else "not a default"


class EditBlock(Block):
    """What `engine.edit` returns."""

    def __init__(self, engine: Engine, name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.edit = Edit(engine, name)
        self.engine = engine
        self.options = options

    def target(self) -> tuple[Block, Edit]:
        return self, self.edit

    def run(self) -> None:
        before = self.engine.edits.known.get(self.edit.name)
        self.edit.version = before.version + 1 if before else 1
        self.edit.source = self.source
        self.engine.edits.known[self.edit.name] = self.edit


class Log:
    path = "/tmp/engine.log"

    def tail(self, lines: int = 40) -> str:
        return "\n".join(f"line {number}" for number in range(100)[-lines:])


class Model:
    """An envoy tree with one leaf."""

    layers = ("layer0", "layer1")

    def __init__(self, repo: str) -> None:
        self.repo = repo


class Engine:
    def __init__(self, model: str, name: str, mode: str, options: dict[str, Any]) -> None:
        self.name, self.mode, self.options = name, mode, options
        self.id = f"{name}-{model}"
        self.model = Model(model)
        self.already_running = False
        self.edits = Edits()
        self.log = Log()
        self.calls: list[tuple[list[str], dict[str, Any]]] = []
        self.delay_s = 0.0
        self.hints: list[str] = []

    @cached_property
    def saves(self) -> Any:
        from nnsight_lab.saves.store import SavesStore  # the real one: it needs no engine

        return SavesStore()

    slept: Any = None

    def sleep(self) -> None:
        self.slept = True

    def wake(self) -> None:
        self.slept = False

    def status(self) -> EngineStatus:
        return EngineStatus(self.name, "ready", self.model.repo, self.mode, "cpu", "float32", up_s=720.0)

    def attach_line(self) -> str:
        return f"%engine attach {self.name}"

    def trace(self, *prompts: Any, edits: Any = None, watch: Any = None, **sampling: Any) -> Tracer:
        flat = list(prompts[0]) if len(prompts) == 1 and isinstance(prompts[0], list) else list(prompts)
        if edits is not None:
            sampling["edits"] = edits
        return Tracer(self, flat, watch, sampling)

    def edit(self, name: str, **options: Any) -> EditBlock:
        return EditBlock(self, name, options)


class Lab:
    """The package's front door."""

    def __init__(self) -> None:
        self.known: dict[str, Engine] = {}
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.current = ""
        self.fails = ""
        self.keeps: list[Any] = []
        self.attached: Any = None

    def start(
        self,
        model: str,
        *,
        name: str = "main",
        mode: str = "auto",
        restart: bool = False,
        progress: Callable[[StartProgress], object] | None = None,
        **options: Any,
    ) -> Engine:
        self.started.append((model, {"name": name, "mode": mode, "restart": restart, **options}))
        if progress:
            progress(StartProgress("reading weights", 0.5))
            progress(StartProgress("warming up", 1.5, (("reading weights", 1.0),)))
        if self.fails:
            raise EngineStartFailed(self.fails)
        alive = self.known.get(name)
        if alive is not None and not restart:
            alive.already_running = True
        else:
            self.known[name] = Engine(model, name, "sync" if mode == "auto" else mode, options)
        self.current = name
        return self.known[name]

    def get_engine(self, name: str | None = None) -> Engine:
        wanted = name or self.current
        if wanted not in self.known:
            raise EngineNotStarted(f"No engine {wanted or 'main'!r}. Start one: %engine start MODEL")
        return self.known[wanted]

    def engines(self) -> dict[str, Engine]:
        return dict(self.known)

    def stop(self, name: str | None = None) -> StopReport:
        engine = self.get_engine(name)
        del self.known[engine.name]
        return StopReport(engine.name, (1, 2), (), 2**30, 0.5)

    def attach(self, url: str | None = None, *, name: str | None = None, token: str | None = None) -> Engine:
        self.attached = (url, name, token)
        return self.start("kept", name=name or "main", mode="async")

    def detach(self, name: str | None = None) -> None:
        del self.known[self.get_engine(name).name]

    def kept(self) -> list[Any]:
        return self.keeps

    def restart(
        self, name: str | None = None, progress: Callable[[StartProgress], object] | None = None
    ) -> Engine:
        engine = self.get_engine(name)
        return self.start(
            engine.model.repo, name=engine.name, mode=engine.mode, restart=True, progress=progress
        )

    def trace(self, *prompts: Any, engine: str | None = None, **options: Any) -> Tracer:
        return self.get_engine(engine).trace(*prompts, **options)

    def edit(self, name: str, *, engine: str | None = None, **options: Any) -> EditBlock:
        return self.get_engine(engine).edit(name, **options)


DOORS = ("start", "attach", "detach", "kept", "get_engine", "engines", "stop", "restart", "trace", "edit")


def install(fake: Lab | None = None) -> Lab:
    """Puts a fake behind the package's front door, for good: in a kernel or a script of its own."""
    fake = fake or Lab()
    for name in DOORS:
        vars(nnsight_lab)[name] = getattr(fake, name)
    return fake

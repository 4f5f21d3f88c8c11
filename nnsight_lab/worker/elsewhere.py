"""The modules that other pipeline stages have, as a block on this stage names them.

The hard fact: vLLM leaves a stage without the layers of the others (one `PPMissingLayer` each, with nothing
in it), and a block is written against the whole model. So the stages tell each other what they have, and each
puts a stand-in where it has nothing: it has the module's name, class name, children and forward (for
``.source``), and no weights. What such a module is asked for is told by the stage that has it (see
`nnsight_lab.worker.stages`); weights of another stage, and calls that need them, are refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from vllm.model_executor.models.utils import PPMissingLayer

_SIDES: Final = frozenset({"input", "output", "skip", "fn"})


class OnAnotherStage(RuntimeError):
    """What was asked for is on a pipeline stage that is not this one."""


class Lacking(AttributeError):
    """The same, of what Python may ask for without harm."""


class Elsewhere(torch.nn.Module):
    """A module that another stage has.

    Attributes:
        path: In the model.
        stage: Which has it, from 0.
        settled: Whether only blocks ask it for anything any more.
    """

    path: str
    stage: int
    settled: bool = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not self.settled:
                raise
        # Not as the error that Python takes for an answer: nnsight would say that there is no such thing.
        raise OnAnotherStage(
            f"{name!r} of {self.path} is on pipeline stage {self.stage + 1}, and this block reaches another "
            "one, too: so the module can be read and written in it, not called, and its weights are not there"
        )


class Seen(NamedTuple):
    """A module of one stage, for the others.

    Attributes:
        path: In the model; "" for the whole.
        module: Of its class.
        name: Of its class.
    """

    path: str
    module: str
    name: str


def modules_here(model: torch.nn.Module) -> tuple[Seen, ...]:
    """The modules that a stage has."""
    return tuple(
        Seen(path, type(module).__module__, type(module).__qualname__)
        for path, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, PPMissingLayer)
    )


class StandIns:
    """The stand-ins of one stage, and which stage has what.

    Args:
        model: This stage's.
        stage: Its number.
        stages: What each of them has.
    """

    def __init__(self, model: torch.nn.Module, stage: int, stages: Sequence[Sequence[Seen]]) -> None:
        self._model = model
        self._last = len(stages) - 1
        #: Path -> the stages that have the module.
        self._by_path: dict[str, list[int]] = {}
        classes: dict[str, Seen] = {}
        for number, seen in enumerate(stages):
            for one in seen:
                self._by_path.setdefault(one.path, []).append(number)
                classes.setdefault(one.path, one)
        parted = [path for path, found in self._by_path.items() if len(found) < len(stages)]
        #: Modules that every stage has a part of.
        self._enclosing = frozenset(
            above
            for path in parted
            for above in _above(path)
            if len(self._by_path.get(above, ())) == len(stages)
        )
        self._made: list[tuple[torch.nn.Module, str, torch.nn.Module, torch.nn.Module]] = []
        for path, module in list(model.named_modules(remove_duplicate=False)):
            if isinstance(module, PPMissingLayer) and path in classes:
                above, _, name = path.rpartition(".")
                self._made.append((model.get_submodule(above), name, module, self._stand_in(path, classes)))
        #: Locations that are served by another stage, of modules that this one has, too.
        self.passed_over = frozenset(
            location
            for path in self._enclosing
            for location in (f"{_location(path)}.input", f"{_location(path)}.output")
            if self.of(location) != stage
        )

    def _stand_in(self, path: str, classes: Mapping[str, Seen]) -> Elsewhere:
        seen = classes[path]
        made: Elsewhere = type(seen.name.rpartition(".")[2], (Elsewhere,), _forward_of(seen))()
        made.path, made.stage = _location(path), self._by_path[path][0]
        start = f"{path}."
        for below in classes:
            if below.startswith(start) and "." not in below[len(start) :]:
                made.add_module(below[len(start) :], self._stand_in(below, classes))
        return made

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The model with a stand-in for each module that it lacks."""
        self.put_in()
        try:
            yield
        finally:
            self.take_out()

    def put_in(self) -> None:
        """Put them where modules are missing; vLLM runs the model without."""
        for parent, name, _, made in self._made:
            parent._modules[name] = made

    def take_out(self) -> None:
        """Leave the model as vLLM made it."""
        for parent, name, missing, _ in self._made:
            parent._modules[name] = missing

    def settle(self) -> None:
        """The tree is made: from now on say what is missing, to blocks."""
        for *_, made in self._made:
            for module in made.modules():
                module.__dict__["settled"] = True

    def of(self, location: str) -> int | None:
        """The stage that serves a location; None where several may."""
        path, side = _split(location)
        if path is None:
            return self._last  # logits, samples
        if path in self._enclosing:
            return 0 if side == "input" else self._last
        stages = self._by_path.get(path, ())
        return stages[0] if len(stages) == 1 else None

    def lacks(self, location: str, stage: int) -> bool:
        """Whether a location is never served on a stage."""
        path, _ = _split(location)
        if path is None:
            return stage != self._last
        found = self.of(location)
        if found is not None:
            return found != stage
        return stage not in self._by_path.get(path, (stage,))


def _location(path: str) -> str:
    return f"model.{path}" if path else "model"


def _split(location: str) -> tuple[str | None, str]:
    """The path of a location's module in the model, and the side; no path of what is no module's."""
    head, inside, _ = location.partition(".source.")
    if inside:
        return head.partition(".")[2], "output"
    head, _, side = location.rpartition(".")
    if side not in _SIDES or not head:
        return None, location
    return head.partition(".")[2], side


def _above(path: str) -> Iterator[str]:
    """The paths of the modules around one, the whole model's last."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _forward_of(seen: Seen) -> dict[str, Any]:
    """The forward of a class, which says what happens in it; nothing where it cannot be found."""
    try:
        found: Any = importlib.import_module(seen.module)
        for part in seen.name.split("."):
            found = getattr(found, part)
        return {"forward": found.forward, "__module__": seen.module}
    except (ImportError, AttributeError):
        return {}

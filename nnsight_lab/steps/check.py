"""What is wrong with a step, in one line: by itself, and against the model that it is for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nnsight_lab.errors import EditRefused, nearest
from nnsight_lab.steps.order import ordered
from nnsight_lab.steps.positions import where
from nnsight_lab.steps.step import (
    MAX_DIRECTIONS,
    MAX_PLACES,
    MAX_STEPS,
    NUMBERS,
    OPS,
    SIDES,
    TENSORS,
    WITH_DIMS,
    Step,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def checked(step: Step) -> Step:
    """The step, where it makes sense by itself.

    Raises:
        EditRefused: It does not.
    """
    __tracebackhide__ = True
    if step.op not in OPS:
        raise EditRefused(f"{step.op!r:.60} is not an operation of a step; these are: {', '.join(OPS)}.")
    if not isinstance(step.site, str) or not step.site:
        raise EditRefused("A step's site is a module's path, as 'model.layers.5'.")
    if step.side not in SIDES:
        raise EditRefused(f"side={step.side!r:.60} is neither 'output' nor 'input'.")
    place = where(step.positions)
    if step.op == "patch" and place.generated:
        raise EditRefused("patch is for rows of the prompt: positions='prompt', 'last', places or ranges.")
    if step.op == "read":
        if not isinstance(step.name, str) or not step.name.isidentifier() or len(step.name) > 100:
            raise EditRefused(f"read saves under a name, of letters, digits and '_', not {step.name!r:.60}.")
    elif step.name:
        raise EditRefused(f"{step.op} has no name; read has.")
    _numbers(step)
    _tensor(step)
    return step


def _numbers(step: Step) -> None:
    wanted = NUMBERS.get(step.op)
    given = {wanted or "number": step.number, "low": step.low, "high": step.high}
    for name, value in given.items():
        if value is None:
            continue
        if name == "number" or (name in ("low", "high") and step.op != "clamp"):
            raise EditRefused(f"{step.op} has no {name}=.")
        if not isinstance(value, int | float) or isinstance(value, bool) or not _finite(value):
            raise EditRefused(f"{name}={value!r:.60} is not a finite number.")
    if step.op == "clamp":
        if step.low is None and step.high is None:
            raise EditRefused("clamp needs low=, high=, or both.")
        if step.low is not None and step.high is not None and step.low > step.high:
            raise EditRefused(f"clamp: low={step.low:g} is above high={step.high:g}.")
    if step.op in ("add", "scale") and step.number is None:
        raise EditRefused(f"{step.op} needs {wanted}=.")
    if step.op == "set" and (step.number is None) == (step.tensor is None):
        raise EditRefused("set takes a number or a row [width], one of the two.")
    if step.dims is None:
        return
    if step.op not in WITH_DIMS:
        raise EditRefused(f"{step.op} has no dims=; {', '.join(WITH_DIMS)} have.")
    if not 0 < len(step.dims) <= MAX_PLACES or len({*step.dims}) < len(step.dims):
        raise EditRefused("dims= are places in a row, at least one, each once.")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _tensor(step: Step) -> None:
    required = TENSORS.get(step.op, False)
    if step.tensor is None:
        if required:
            raise EditRefused(f"{step.op} needs a tensor.")
        return
    if required is False:
        raise EditRefused(f"{step.op} has no tensor.")
    shape = list(step.tensor.shape)
    if step.tensor.dtype not in _DTYPES:
        kinds = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
        seen = str(step.tensor.dtype).removeprefix("torch.")
        raise EditRefused(f"{step.op}: the tensor is {seen}; {kinds} can be used.")
    forms = {"patch": (2,), "set": (1,), "ablate": (1,)}.get(step.op, (1, 2))
    if step.tensor.ndim not in forms or not step.tensor.numel():
        wanted = " or ".join({1: "[width]", 2: "[position, width]"}[n] for n in forms)
        if step.op == "project_out":
            wanted = "[width] or [direction, width]"
        raise EditRefused(f"{step.op}: the tensor is {shape}; {wanted} is wanted.")
    if not bool(torch.isfinite(step.tensor).all()):
        raise EditRefused(f"{step.op}: the tensor holds NaN or infinity.")
    if step.op == "project_out" and step.tensor.numel() // shape[-1] > MAX_DIRECTIONS:
        raise EditRefused(f"project_out takes at most {MAX_DIRECTIONS} directions, not {shape[0]}.")
    if step.op == "project_out" and not bool((step.tensor.reshape(-1, shape[-1]) != 0).any(-1).all()):
        raise EditRefused("project_out: a direction is zero everywhere, so it has no direction.")
    if step.op == "add" and step.tensor.ndim == 2 and where(step.positions).generated:
        raise EditRefused(
            "add: a row for each position is for positions of the prompt; generated ones have [width]."
        )
    if step.dims is not None and shape[-1] != len(step.dims):
        raise EditRefused(f"{step.op}: the tensor has {shape[-1]} values for {len(step.dims)} dims.")


def fitted(steps: Any, modules: Mapping[str, str], *, layers: int, hidden: int) -> tuple[Step, ...]:
    """The steps of an edit in the order in which the model reaches their sites.

    Args:
        steps: As they were given.
        modules: Path -> class name of every module, in the model's order.
        layers: How many decoder layers it has.
        hidden: Size of its residual stream.

    Raises:
        EditRefused: They are no steps, or the model has no such site.
    """
    __tracebackhide__ = True
    if not isinstance(steps, Sequence) or isinstance(steps, str | bytes) or not steps:
        raise EditRefused('steps= takes a list of steps: steps=[lab.steps.add("model.layers.5", vector)].')
    if len(steps) > MAX_STEPS:
        raise EditRefused(f"An edit has at most {MAX_STEPS} steps, not {len(steps)}.")
    streams = stream_sites(modules.items(), layers)
    names = set()
    for number, step in enumerate(steps):
        if not isinstance(step, Step):
            raise EditRefused(
                f"steps[{number}] is a {type(step).__name__}; lab.steps.read, add, … make steps."
            )
        checked(step)
        if step.site not in modules:
            raise EditRefused(f"The model has no module {step.site!r:.100}.{nearest(step.site, modules)}")
        if modules[step.site] in ("ModuleList", "ModuleDict"):
            raise EditRefused(
                f"{step.site!r} is a list of modules, which runs none itself: say which of them."
            )
        if step.op == "read":
            if step.name in names:
                raise EditRefused(f"Two steps save under the name {step.name!r}.")
            names.add(step.name)
        if step.site in streams and hidden:
            _wide(step, hidden)
    return ordered(steps, modules)


def _wide(step: Step, hidden: int) -> None:
    if step.tensor is not None and step.dims is None and step.tensor.shape[-1] not in (hidden, 1):
        seen = list(step.tensor.shape)
        raise EditRefused(
            f"{step.op} at {step.site!r}: the tensor is {seen}, and the residual stream has {hidden}."
        )
    off = [one for one in step.dims or () if not -hidden <= one < hidden]
    if off:
        raise EditRefused(
            f"{step.op} at {step.site!r}: there is no dim {off[0]} of the residual stream's {hidden}."
        )


def stream_sites(modules: Iterable[tuple[str, str]], layers: int) -> frozenset[str]:
    """The paths of the decoder layers: what stands in a list that is as long as the model has layers."""
    children: dict[str, list[str]] = {}
    for path, kind in modules:
        if kind == "ModuleList":
            children[path] = []
        parent = path.rpartition(".")[0]
        if parent in children and path:
            children[parent].append(path)
    return frozenset(path for found in children.values() if len(found) == layers for path in found)

"""Steps as JSON with tensors beside it, for whoever has neither this package nor its codec.

``{"op": "add", "site": "model.layers.5", "tensor": "v", "scale": 3, "positions": "last"}``, where ``"v"`` is
a tensor of a safetensors file; or the numbers stand there themselves, as ``"tensor": [0.1, 0.2]``. The keys
are those of `nnsight_lab.steps`' functions, with ``tensor`` for what is added, set, projected out or patched
in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnsight_lab.errors import EditRefused, nearest
from nnsight_lab.steps.check import checked
from nnsight_lab.steps.positions import positions_of
from nnsight_lab.steps.step import MAX_STEPS, NUMBERS, OPS, TENSORS, WITH_DIMS, Step

_PLAIN = ("op", "site", "side", "positions")


def keys_of(op: str) -> tuple[str, ...]:
    """What a step of that operation may say in JSON."""
    return (
        *_PLAIN,
        *(("name",) if op == "read" else ()),
        *(("tensor",) if op in TENSORS else ()),
        *((NUMBERS[op],) if op in NUMBERS else ()),
        *(("low", "high") if op == "clamp" else ()),
        *(("dims",) if op in WITH_DIMS else ()),
    )


def of_json(told: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Step, ...]:
    """The steps that JSON says.

    Args:
        told: A list of objects.
        tensors: By name, of the file beside it.

    Raises:
        EditRefused: It says none.
    """
    if not isinstance(told, list) or not told:
        raise EditRefused('"steps" should be a list of steps: [{"op": "add", "site": "model.layers.5", …}].')
    if len(told) > MAX_STEPS:
        raise EditRefused(f"An edit has at most {MAX_STEPS} steps, not {len(told)}.")
    found = []
    for number, one in enumerate(told):
        try:
            found.append(_step(one, tensors))
        except EditRefused as refused:
            raise EditRefused(f"steps[{number}]: {refused}") from None
    return tuple(found)


def _step(told: Any, tensors: Mapping[str, torch.Tensor]) -> Step:
    if not isinstance(told, dict):
        raise EditRefused(f"it is a {type(told).__name__}, not an object.")
    op = told.get("op")
    if op not in OPS:
        raise EditRefused(f"{op!r:.60} is not an operation; these are: {', '.join(OPS)}.")
    known = keys_of(op)
    for key in told:
        if key not in known:
            raise EditRefused(f"{op} has no {key!r:.60}.{nearest(key, known)}")
    more: dict[str, Any] = {}
    number = NUMBERS.get(op)
    if number is not None and number in told:
        more["number"] = told[number]
    elif op == "add":
        more["number"] = 1.0
    more |= {key: told[key] for key in ("low", "high", "name") if key in told}
    if "tensor" in told:
        more["tensor"] = _tensor(told["tensor"], tensors)
    if told.get("dims") is not None:
        more["dims"] = _dims(told["dims"])
    default = "prompt" if op == "patch" else "all"
    positions = positions_of(told.get("positions", default))
    return checked(Step(op, told.get("site", ""), told.get("side", "output"), positions, **more))


def _tensor(told: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(told, str):
        if told not in tensors:
            there = nearest(told, tensors) if tensors else " There is none beside the steps."
            raise EditRefused(f"there is no tensor {told!r:.100}.{there}")
        return tensors[told]
    try:
        if not isinstance(told, list):
            raise TypeError
        return torch.tensor(told, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise EditRefused('"tensor" is the name of a tensor, or its numbers: [0.1, 0.2].') from None


def _dims(told: Any) -> tuple[int, ...]:
    if not isinstance(told, list) or not all(type(one) is int for one in told):
        raise EditRefused('"dims" is a list of places in a row: [0, 5].')
    return tuple(told)


def to_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The same as JSON, a tensor by its dtype and shape: ``"float32 [576]"``."""
    return [_told(step) for step in steps]


def _told(step: Step) -> dict[str, Any]:
    where = step.positions[0] if len(step.positions) == 1 else list(step.positions)
    found = {"op": step.op, "site": step.site, "side": step.side, "positions": where}
    if step.name:
        found["name"] = step.name
    if step.tensor is not None:
        dtype = str(step.tensor.dtype).removeprefix("torch.")
        found["tensor"] = f"{dtype} {list(step.tensor.shape)}"
    if step.number is not None:
        found[NUMBERS[step.op]] = step.number
    found |= {k: v for k, v in (("low", step.low), ("high", step.high)) if v is not None}
    if step.dims is not None:
        found["dims"] = list(step.dims)
    return found

"""The functions that make steps: ``lab.steps.add("model.layers.5", vector, scale=3, positions="last")``.

A site is a module's path, as `print(model)` shows it, or the module itself; at a decoder layer the rows are
the residual stream. Whether the model has the site is said when the edit is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_lab.errors import EditRefused
from nnsight_lab.steps.check import checked
from nnsight_lab.steps.positions import positions_of
from nnsight_lab.steps.step import Step


def read(site: Any, name: str, *, positions: Any = "all", side: str = "output") -> Step:
    """Save the rows under ``name``: ``[position, width]``.

    Where generated tokens are asked for as well, a list with one such tensor for each forward pass.
    """
    return _made("read", site, positions, side, name=name)


def add(site: Any, vector: Any, *, scale: float = 1.0, positions: Any = "all", side: str = "output") -> Step:
    """Add ``scale * vector`` to each row (steering): ``[width]``, or ``[position, width]``.

    The product is taken in the vector's dtype, then brought into the model's.
    """
    return _made(
        "add", site, positions, side, tensor=_tensor(vector, "vector"), number=_number(scale, "scale")
    )


def scale(
    site: Any, factor: float, *, positions: Any = "all", dims: Any = None, side: str = "output"
) -> Step:
    """Multiply each row, or some of its values, by ``factor``."""
    return _made("scale", site, positions, side, number=_number(factor, "factor"), dims=_dims(dims))


def set(site: Any, value: Any, *, positions: Any = "all", dims: Any = None, side: str = "output") -> Step:
    """Put a number or a row ``[width]`` in the place of each row, or of some of its values."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _made("set", site, positions, side, number=_number(value, "value"), dims=_dims(dims))
    return _made("set", site, positions, side, tensor=_tensor(value, "value"), dims=_dims(dims))


def project_out(site: Any, direction: Any, *, positions: Any = "all", side: str = "output") -> Step:
    """Take from each row what lies along ``direction``: ``[width]``, or several, ``[k, width]``.

    Directional ablation, as in arXiv 2406.11717; computed in float32. Directions need not be normed.
    """
    return _made("project_out", site, positions, side, tensor=_tensor(direction, "direction"))


def ablate(
    site: Any, *, positions: Any = "all", dims: Any = None, mean: Any = None, side: str = "output"
) -> Step:
    """Zero-ablate each row or some of its values; or, with ``mean`` (``[width]``), put the mean there."""
    tensor = None if mean is None else _tensor(mean, "mean")
    return _made("ablate", site, positions, side, tensor=tensor, dims=_dims(dims))


def clamp(
    site: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    positions: Any = "all",
    dims: Any = None,
    side: str = "output",
) -> Step:
    """Bring each value into ``low`` to ``high``."""
    ends = {key: _number(end, key) for key, end in (("low", low), ("high", high)) if end is not None}
    return _made("clamp", site, positions, side, dims=_dims(dims), **ends)


def patch(site: Any, rows: Any, *, positions: Any = "all", side: str = "output") -> Step:
    """Put rows of another run in the place of these (activation patching).

    ``rows`` is ``[position, width]``, a row for each position; or all the rows of a prompt that is as long as
    the one it runs on, of which those at ``positions`` are taken. Rows of generated tokens are not patched:
    with the default, those of the prompt are.
    """
    if positions == "all":
        positions = "prompt"
    return _made("patch", site, positions, side, tensor=_tensor(rows, "rows"))


def _made(op: str, site: Any, positions: Any, side: str, **more: Any) -> Step:
    __tracebackhide__ = True
    return checked(Step(op, _path(site), side, positions_of(positions), **more))


def _path(site: Any) -> str:
    if not isinstance(site, str):
        # An envoy of the tree; a block's `model` is its root, which the paths of modules do not begin with.
        path = getattr(site, "path", None)
        if not isinstance(path, str):
            raise EditRefused("A site is a module's path, as 'model.layers.5', or the module itself.")
        return path.removeprefix("model.")
    return site


def _tensor(given: Any, what: str) -> torch.Tensor:
    try:
        found = torch.as_tensor(given)
        if not found.is_floating_point():
            found = found.float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise EditRefused(f"{what}= should be a tensor of numbers: {str(error).splitlines()[0]}.") from None
    # Its own memory: what its owner changes later is not in the edit, and a view does not bring its whole.
    return found.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _number(given: Any, what: str) -> float:
    try:
        if isinstance(given, bool | str):
            raise TypeError
        return float(given)
    except (TypeError, ValueError):
        raise EditRefused(f"{what}={given!r:.60} is not a number.") from None


def _dims(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        return tuple(int(one) for one in (given.tolist() if hasattr(given, "tolist") else given))
    except (TypeError, ValueError):
        raise EditRefused(f"dims={given!r:.60} is not a list of places in a row.") from None

"""One step of an edit, as it is kept and as it travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from nnsight_lab.wire.registry import register

#: What a step may do, and nothing else.
OPS: Final = ("read", "add", "scale", "set", "project_out", "ablate", "clamp", "patch")
SIDES: Final = ("output", "input")

#: What each operation calls its number, and whether it has a tensor: required, allowed, or not at all.
NUMBERS: Final = {"add": "scale", "scale": "factor", "set": "value"}
TENSORS: Final = {"add": True, "project_out": True, "patch": True, "set": None, "ablate": None}
#: What may be done to some of a row's values only.
WITH_DIMS: Final = ("scale", "set", "ablate", "clamp")

#: Of one edit.
MAX_STEPS: Final = 1024
#: Of one step.
MAX_PLACES: Final = 65_536
#: Of one step: their basis is computed while others wait.
MAX_DIRECTIONS: Final = 256


@register
@dataclass(frozen=True, eq=False)
class Step:
    """An operation at a site.

    Attributes:
        op: One of `OPS`.
        site: A module's path, ``model.layers.5``. At a decoder layer the rows are the residual stream,
            whether the layer is fused or not; elsewhere those of its first float tensor.
        side: ``output`` or ``input``.
        positions: Of words (``all``, ``last``, ``prompt``, ``generated``), places in the prompt, and ranges
            of them (``"2:5"``); together, each row once.
        name: What `read` saves under.
        tensor: What is added, set, projected out or patched in; the mean of a mean-ablation.
        number: The scale, the factor, or the value that is set.
        low: Of `clamp`; None for none.
        high: Of `clamp`; None for none.
        dims: Which of a row's values; None for all.
    """

    op: str
    site: str
    side: str = "output"
    positions: tuple[Any, ...] = ("all",)
    name: str = ""
    tensor: torch.Tensor | None = None
    number: float | None = None
    low: float | None = None
    high: float | None = None
    dims: tuple[int, ...] | None = None

    @property
    def location(self) -> str:
        """Site and side."""
        return f"{self.site}.{self.side}"

    def __str__(self) -> str:
        """As it is written in Python, a tensor by its shape."""
        said = [repr(self.site)]
        if self.op == "read":
            said.append(repr(self.name))
        if self.tensor is not None:
            shape = list(self.tensor.shape)
            said.append(f"mean=tensor{shape}" if self.op == "ablate" else f"tensor{shape}")
        elif self.op == "set":
            said.append(f"{self.number:g}")
        if self.op == "scale":
            said.append(f"{self.number:g}")
        if self.op == "add" and self.number not in (None, 1):
            said.append(f"scale={self.number:g}")
        said += [f"{k}={v:g}" for k, v in (("low", self.low), ("high", self.high)) if v is not None]
        if self.positions != ("all",):
            where = self.positions[0] if len(self.positions) == 1 else list(self.positions)
            said.append(f"positions={where!r}")
        if self.dims is not None:
            said.append(
                f"dims={list(self.dims)}" if len(self.dims) <= 8 else f"dims=[{len(self.dims)} of them]"
            )
        if self.side != "output":
            said.append(f"side={self.side!r}")
        return f"lab.steps.{self.op}({', '.join(said)})"

    __repr__ = __str__

"""What an operation does to rows: pure tensor functions."""

from __future__ import annotations

import torch

from nnsight_lab.steps.step import Step

#: Singular values below this share of the largest are directions that others span already.
_SPANNED = 1e-6


class Prepared:
    """A step with its tensor as rows of one dtype and device need it.

    Args:
        step: The step; one that changes rows.
        like: Rows that it will be used on.
    """

    def __init__(self, step: Step, like: torch.Tensor) -> None:
        self.op = step.op
        self.number = step.number
        self.low, self.high = step.low, step.high
        device = like.device
        self.dims = None if step.dims is None else torch.tensor(step.dims, device=device)
        self.tensor: torch.Tensor | None = None
        tensor = step.tensor
        if tensor is None:
            return
        if step.op == "project_out":
            self.tensor = basis(tensor).to(device)
            return
        if step.op == "add":
            tensor = tensor * (1.0 if step.number is None else step.number)
        self.tensor = tensor.to(device=device, dtype=like.dtype)

    def of(self, rows: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        """New rows.

        Args:
            rows: ``[position, width]`` (or more dimensions before the width), not changed.
            given: Those of the step's rows that belong to these, where it has one for each.
        """
        if self.dims is None:
            return self._of(rows, self.tensor if given is None else given)
        found = rows.clone()
        found[..., self.dims] = self._of(rows[..., self.dims], self.tensor).to(rows.dtype)
        return found

    def _of(self, rows: torch.Tensor, tensor: torch.Tensor | None) -> torch.Tensor:
        if self.op == "add":
            assert tensor is not None
            return torch.add(rows, tensor)
        if self.op == "scale":
            assert self.number is not None
            return torch.mul(rows, self.number)
        if self.op == "project_out":
            assert tensor is not None
            wide = rows.float()
            kept: torch.Tensor = wide - (wide @ tensor) @ tensor.T
            return kept.to(rows.dtype)
        if self.op == "clamp":
            return torch.clamp(rows, self.low, self.high)
        if tensor is not None:  # set, patch, mean-ablation
            return tensor.expand_as(rows)
        return torch.full_like(rows, self.number or 0.0)


def basis(directions: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of what directions span.

    Args:
        directions: ``[width]`` or ``[direction, width]``.

    Returns:
        ``[width, k]``, float32.
    """
    wide = directions.double().reshape(-1, directions.shape[-1])
    if wide.shape[0] == 1:
        single: torch.Tensor = (wide / wide.norm()).T
        return single.float()
    left, sizes, _ = torch.linalg.svd(wide.T, full_matrices=False)
    spanning: torch.Tensor = left[:, sizes > _SPANNED * sizes[0]]
    return spanning.float()

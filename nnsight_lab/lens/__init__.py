"""Pure tensor functions: what a value of a forward pass means. Shapes in every docstring."""

from __future__ import annotations

from nnsight_lab.lens.residual import residual

__all__ = ["residual"]

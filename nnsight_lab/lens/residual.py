"""The residual stream after a decoder layer, whatever form vLLM gives it.

vLLM fuses the residual addition into the next layer's norm, so most decoder layers return
``(hidden, residual)`` and the stream is their *sum*; ``output[0]`` alone is only what the layer's
MLP wrote, wrong by as much as the stream itself, and a cosine against Hugging Face does not see it
(0.9999 at 1.9 times the norm). Unfused architectures (GPT-2, GPT-NeoX) return the stream itself, and
vLLM's Transformers backend puts a batch axis of one before it.
"""

from __future__ import annotations

from typing import Any

import torch


def residual(output: Any) -> torch.Tensor:
    """The residual stream of one request after a layer, from that layer's ``.output``.

    Works in a block (``lab.residual(model.model.layers[3].output).save()``) and on saved values.

    Args:
        output: A decoder layer's output: ``(hidden, residual)`` of ``[token, hidden]`` each (fused), a
            tensor ``[token, hidden]``, or ``[1, token, hidden]``.

    Returns:
        ``[token, hidden]``, in the model's dtype; a new tensor where the layer is fused.

    Raises:
        TypeError: For anything else, rather than a tensor that is not the stream.
    """
    if isinstance(output, torch.Tensor):
        return output[0] if output.ndim == 3 and output.shape[0] == 1 else output
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        if len(output) == 1 or output[1] is None:
            return residual(output[0])
        if isinstance(output[1], torch.Tensor) and output[1].shape == output[0].shape:
            return output[0] + output[1]
    raise TypeError(
        f"Not a decoder layer's output: expected (hidden, residual) or a tensor, got {_shape(output)}."
    )


def _shape(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(_shape(item) for item in value)})"
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__

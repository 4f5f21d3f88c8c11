"""Blocks compute on a CUDA stream of their own, beside the model's.

A hundred blocks that each look at a row of logits launch hundreds of small kernels, and in the model's own
stream it would wait for every one of them. Here the model waits for what a block *reads* to be copied, which
is one kernel, and for the rest only where a block wrote: what is merely computed and kept runs beside the
next layers.

One rule keeps memory right: whatever a block touches is allocated and used on this stream, and the model's
own tensors only while its stream waits. What goes the other way, an assigned value, is recorded for the
model's stream.
"""

from __future__ import annotations

from typing import Any

import torch
from nnsight.util import apply


class Aside:
    """The stream; entered around whatever runs a block, however deep.

    Args:
        device: The worker's.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._model: Any = None
        self._depth = 0
        self._copied: Any = None

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._model = torch.cuda.current_stream()
            self.stream.wait_stream(self._model)
            torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        torch.cuda.set_stream(self._model)
        copied, self._copied = self._copied, None
        if copied is None:
            self._model.wait_stream(self.stream)
        else:
            self._model.wait_event(copied)

    def copied(self) -> None:
        """What is read has been copied: the model waits for no more, unless `written` is said."""
        if self._depth == 1:
            self._copied = self.stream.record_event()

    def written(self) -> None:
        """The model needs what a block did."""
        self._copied = None

    def hand_over(self, value: Any) -> None:
        """Values of this stream that the model goes on with."""
        apply(
            value, lambda tensor: tensor.record_stream(self._model) if tensor.is_cuda else None, torch.Tensor
        )

    def join(self, stream: Any) -> None:
        """Have a stream wait for all that blocks did."""
        stream.wait_stream(self.stream)

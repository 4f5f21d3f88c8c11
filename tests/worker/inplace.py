"""A CPU worker that overwrites activations as vLLM's CUDA kernels do.

On CUDA, ``fused_add_rms_norm`` writes its result into its inputs, so a view of a layer's output holds
a later layer's data a moment after it was read; the CPU's own version returns new tensors, which hides
the fault. Here it writes in place as well. The batcher can be switched to nnsight's own, to show that
without private copies the fault is there.
"""

from __future__ import annotations

from typing import Any, ClassVar

from nnsight.modeling.vllm.batching import VLLMBatcher

from nnsight_lab.worker.batching import LabBatcher
from nnsight_lab.worker.cpu import LabCPUWorker


class SharingBatcher(VLLMBatcher):
    """nnsight's own: a block is served views of the model's buffers."""

    partial_skip: ClassVar[list[Any]] = []  # what the interleaver of this package looks for


class InPlaceCPUWorker(LabCPUWorker):
    """The package's CPU worker under a norm that overwrites what it is given."""

    overwritten = 0

    def init_device(self) -> None:
        from vllm import ir

        implementation = ir.ops.fused_add_rms_norm.impls["native"]
        pure = implementation.impl_fn

        def in_place(x: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
            normed, summed = pure(x, residual, *args, **kwargs)
            x.copy_(normed)
            residual.copy_(summed)
            InPlaceCPUWorker.overwritten += 1
            return x, residual

        # The implementation is a frozen object.
        object.__setattr__(implementation, "impl_fn", in_place)
        super().init_device()

    def overwritten_count(self) -> int:
        """How many norms have overwritten their inputs, so that a test sees the stand-in stand in."""
        return InPlaceCPUWorker.overwritten

    def share_views(self, sharing: bool) -> None:
        """Serve blocks views, as nnsight does, or private copies, as this package does."""
        interleaver = self.model_runner.nnsight_model.interleaver
        interleaver.batcher = SharingBatcher(None) if sharing else LabBatcher(None)

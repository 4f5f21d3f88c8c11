"""A CPU worker that overwrites activations, and copies late, as CUDA does.

On CUDA, ``fused_add_rms_norm`` writes its result into its inputs, so a view of a layer's output holds
a later layer's data a moment after it was read; the CPU's own version returns new tensors, which hides
the fault. Here it writes in place as well. The batcher can be switched to nnsight's own, to show that
without private copies the fault is there.

On CUDA saved values are copied beside the next step's work, and are there only when they are waited for:
here they are copied just then and not before, and even the smallest go that way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from nnsight.modeling.vllm.batching import VLLMBatcher

from nnsight_lab.worker import batching, stacks
from nnsight_lab.worker.batching import LabBatcher
from nnsight_lab.worker.courier import Copies, Courier
from nnsight_lab.worker.cpu import LabCPUWorker
from nnsight_lab.worker.stacked import StackedRun
from nnsight_lab.worker.stacks import Stacks
from nnsight_lab.worker.together import Together


class SharingBatcher(VLLMBatcher):
    """nnsight's own: a block is served views of the model's buffers."""

    partial_skip: ClassVar[list[Any]] = []  # what the interleaver of this package looks for
    commons: ClassVar[Any] = None


class CountedCommon(batching.Common):
    """The package's own, counted."""

    made = 0

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(value)
        CountedCommon.made += 1


batching.Common = CountedCommon  # type: ignore[misc]


class CountedRun(StackedRun):
    """The package's own, counted."""

    made = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        CountedRun.made += 1


stacks.StackedRun = CountedRun  # type: ignore[misc]


class Late:
    """Work that is not done before it is waited for, which is the latest a CUDA event may be reached."""

    waited_for = 0

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def synchronize(self) -> None:
        """Do it now, if it was not done yet."""
        if self._work is not None:
            Late.waited_for += 1
            self._work()
            self._work = None


class LateCourier(Courier):
    """Copies as CUDA's copy stream does: begun when a block ends, over when they are waited for."""

    overlaps = True

    def _copy(self, layout: Any, extent: Any) -> Copies:
        memory = self._pool.view(extent)
        return Copies(Late(lambda: layout.copy_into(memory)), layout.sources)

    def _copy_stack(self, stack: Any, extent: Any) -> Copies:
        memory = self._pool.view(extent)
        return Copies(Late(lambda: stack.copy_into(memory)), ())


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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        courier = self.model_runner.courier
        courier.__class__ = LateCourier
        courier._inline_bytes = 0
        self.model_runner.nnsight_requests.ended = []  # which were asked for before the copies were late

    def waited_for(self) -> int:
        """How many copies were waited for."""
        return Late.waited_for

    def used_bytes(self) -> int:
        """What is in use of this worker's shared memory."""
        return self.model_runner.courier.used_bytes

    def overwritten_count(self) -> int:
        """How many norms have overwritten their inputs, so that a test sees the stand-in stand in."""
        return InPlaceCPUWorker.overwritten

    def share_copies(self, sharing: bool) -> None:
        """Serve the blocks of a step pieces of a common copy, as the package does, or a copy each."""
        batching.COMMON_BYTES = 4 << 20 if sharing else 0
        self.model_runner.nnsight_model.interleaver.together = Together() if sharing else None

    def large_copies(self) -> list[str]:
        """Take every tensor for one too large to share unless nobody keeps a piece of it; who kept one."""
        together = self.model_runner.nnsight_model.interleaver.together
        batching.COMMON_BYTES = 64
        return sorted(together.kept)

    def stack_blocks(self, stacking: bool) -> None:
        """Run a block once for many requests, as the package does, or for each by itself."""
        requests = self.model_runner.nnsight_requests
        requests.stacks = requests.interleaver.stacks = Stacks(requests) if stacking else None

    def stacked_runs(self) -> int:
        """How many runs for many there have been since this was last asked."""
        made, CountedRun.made = CountedRun.made, 0
        return made

    def common_copies(self) -> int:
        """How many common copies there have been."""
        return CountedCommon.made

    def share_views(self, sharing: bool) -> None:
        """Serve blocks views, as nnsight does, or private copies, as this package does."""
        interleaver = self.model_runner.nnsight_model.interleaver
        interleaver.batcher = SharingBatcher(None) if sharing else LabBatcher(None)
        interleaver.together = None if sharing else Together()

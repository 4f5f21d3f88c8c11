"""A CPU worker that acts replays out, where there are no CUDA graphs.

In a step that a graph would replay the modules run, but only taps may serve a block. Activations are
overwritten and copies are late as on CUDA (see `tests.worker.inplace`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnsight_lab.blocks.taps import DECODER_LAYERS
from nnsight_lab.worker import runner
from nnsight_lab.worker.fragments import LabFragments
from tests import models
from tests.waiting import OneEngine
from tests.worker.inplace import InPlaceCPUWorker

WORKER = "tests.worker.acting.ActingCPUWorker"
CONTEXT = 128
#: Of a model of four layers: every decoder layer, and two places that are cut under tensor parallelism.
CUT_TAPS = [
    *(f"model.model.layers.{layer}.{side}" for layer in range(4) for side in ("input", "output")),
    "model.model.layers.1.self_attn.qkv_proj.output",
    "model.model.layers.2.mlp.act_fn.output",
]
#: Of the cache: above what one longest request needs, so that several long ones cannot all stay.
_BLOCKS = 10


class CountedFragments(LabFragments):
    """The package's own, counted."""

    count = 0

    def _joined(self, way: Any, piece: Any) -> Any:
        CountedFragments.count += 1
        return super()._joined(way, piece)


runner.LabFragments = CountedFragments  # type: ignore[misc]


class ActingCPUWorker(InPlaceCPUWorker):
    """This package's CPU worker; replays are acted out once it is told so."""

    resumptions = 0

    def gathered(self) -> int:
        """How many tensors were put together of the ranks' pieces."""
        return CountedFragments.count

    def act_replays(self, acts: bool) -> None:
        """Act replays out from the next step on, or run every module again."""
        self.model_runner.acts_replays = acts

    def execute_model(self, scheduler_output: Any) -> Any:
        ActingCPUWorker.resumptions += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return super().execute_model(scheduler_output)

    def resumed(self) -> int:
        """How many requests went on that had lost their place in the cache."""
        return ActingCPUWorker.resumptions

    def forget_visits(self) -> None:
        """Know as little of how often modules are reached as a worker that has just begun."""
        steps = self.model_runner.steps
        steps.visits.clear()
        steps._known = 0


def taps() -> list[str]:
    """What an engine on CUDA taps by itself: input and output of every decoder layer."""
    return [DECODER_LAYERS]


def two_ranks(one_engine: OneEngine, llama_path: Path) -> Any:
    """The engine of all tests of two tensor-parallel ranks.

    Its worker copies everything through shared memory, so what each rank moved can be seen.
    """
    return one_engine.want(
        llama_path,
        "sync",
        worker=WORKER,
        dtype="float32",
        max_model_len=models.CONTEXT,
        tensor_parallel_size=2,
        additional_config={"nnsight_taps": CUT_TAPS},
    )


def replaying(one_engine: OneEngine, llama_path: Path) -> Any:
    """The engine of all tests of replays: a LoRA may come, and its cache is small."""
    return one_engine.want(
        llama_path,
        "sync",
        worker=WORKER,
        dtype="float32",
        max_model_len=CONTEXT,
        block_size=32,
        num_gpu_blocks_override=_BLOCKS,
        enable_lora=True,
        max_lora_rank=8,
        # A request without one takes the last slot of vLLM on a CPU, which is right while that is empty.
        max_loras=2,
        additional_config={"nnsight_taps": taps()},
    )

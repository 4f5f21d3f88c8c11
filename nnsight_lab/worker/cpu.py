"""nnsight blocks on vLLM's CPU engine.

nnsight ships a worker for CUDA only; its runner touches nothing CUDA needs, so the same behaviour
is put on vLLM's CPU runner. A runner of another kind is refused, not run uninstrumented.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from nnsight_lab import pins
from nnsight_lab.errors import EngineStartFailed
from nnsight_lab.worker.poison import Poison, handed_out
from nnsight_lab.worker.rpc import LabRPC
from nnsight_lab.worker.runner import LabRunner, PipelineStage
from nnsight_lab.worker.seeds import mark, rewindable


class LabCPURunner(LabRunner, PipelineStage, CPUModelRunner):
    """vLLM's CPU runner with blocks.

    Attributes:
        ridden: The requests that blocks rode, until the scheduler says that they are over.
        poison: Cache blocks that one of them left with values that are not finite.
    """

    ridden: set[str]
    poison: Poison

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.ridden = set()
        self.poison = Poison()

    def _update_states(self, scheduler_output: Any) -> None:
        # Before the step that may give their cache blocks to others.
        over = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request_id in self.ridden & over:
            state = self.requests.get(request_id)
            if state is not None:
                blocks = (block for group in state.block_ids for block in group)
                self.poison.look(self.kv_caches, blocks, request_id)
        self.ridden -= scheduler_output.finished_req_ids
        self.poison.clear(self.kv_caches, handed_out(scheduler_output, self.cache_config.block_size))
        super()._update_states(scheduler_output)
        rewindable(
            self.requests, self.input_batch, [new.req_id for new in scheduler_output.scheduled_new_reqs]
        )
        tracked = self.nnsight_requests.requests
        self.ridden.update(new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in tracked)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        mark(self.input_batch)
        return super()._sample(*args, **kwargs)


class LabCPUWorker(LabRPC, CPUWorker):
    """vLLM's CPU worker with blocks."""

    def init_device(self) -> None:
        """Set the device up as vLLM does, then put blocks on the runner it built.

        Raises:
            UpstreamChanged: When a private name is not what it was.
            EngineStartFailed: When the runner is of a kind that cannot be instrumented.
        """
        pins.check(pins.WORKER + pins.CPU_WORKER)
        pins.ask_for_amx()
        pins.keep_cpu_weights()
        super().init_device()
        runner = self.model_runner
        if type(runner) is not CPUModelRunner:
            raise EngineStartFailed(
                f"blocks run on vLLM's CPUModelRunner, but this worker built {type(runner).__module__}."
                f"{type(runner).__qualname__}: unset VLLM_USE_V2_MODEL_RUNNER and drop options that "
                "choose another runner"
            )
        runner.__class__ = LabCPURunner

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, which without a run of the model makes no room for what a stage receives."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return super().compile_or_warm_up_model()

"""nnsight blocks on vLLM's CPU engine.

nnsight ships a worker for CUDA only; its runner touches nothing CUDA needs, so the same behaviour
is put on vLLM's CPU runner. A runner of another kind is refused, not run uninstrumented.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from nnsight_lab import pins
from nnsight_lab.errors import EngineStartFailed
from nnsight_lab.worker.rpc import LabRPC
from nnsight_lab.worker.runner import LabRunner


class LabCPURunner(LabRunner, CPUModelRunner):
    """vLLM's CPU runner with blocks."""


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

"""nnsight blocks on vLLM's CUDA engine: nnsight's own worker with this package's runner."""

from __future__ import annotations

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker

from nnsight_lab import pins
from nnsight_lab.errors import EngineStartFailed
from nnsight_lab.worker.rpc import LabRPC
from nnsight_lab.worker.runner import LabRunner, PipelineStage


class LabGPURunner(LabRunner, PipelineStage):
    """vLLM's CUDA runner with blocks."""


class LabGPUWorker(LabRPC, NNsightGPUWorker):
    """vLLM's CUDA worker with blocks."""

    def init_device(self) -> None:
        """Set the device up as vLLM does, then put blocks on the runner it built.

        Raises:
            UpstreamChanged: When a private name is not what it was.
            EngineStartFailed: When the runner is of a kind that cannot be instrumented.
        """
        pins.check(pins.WORKER)
        taps = (self.vllm_config.additional_config or {}).get("nnsight_taps")
        if not (taps or self.model_config.enforce_eager):
            raise EngineStartFailed(
                "blocks would see nothing of steps that replay CUDA graphs without taps: add "
                "enforce_eager=True, or let nnsight_lab.start or nnsight-lab serve choose"
            )
        try:
            super().init_device()
        except NotImplementedError as error:
            raise EngineStartFailed(str(error)) from None
        runner = self.model_runner
        if type(runner) is not NNsightGPUModelRunner:
            raise EngineStartFailed(
                f"blocks run on vLLM's GPUModelRunner, but this worker built {type(runner).__module__}."
                f"{type(runner).__qualname__}"
            )
        runner.__class__ = LabGPURunner

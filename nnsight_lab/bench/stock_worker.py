"""nnsight's own runner on vLLM's CPU engine, with nothing of ours: the peer the benchmark compares with.

nnsight ships a CUDA worker only; mixing its runner into vLLM's CPU worker is the least that lets it
run here at all. On CUDA the peer is nnsight's own class.
"""

from __future__ import annotations

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class StockCPURunner(NNsightGPUModelRunner, CPUModelRunner):
    """nnsight's runner on vLLM's CPU runner."""


class StockCPUWorker(CPUWorker):
    """vLLM's CPU worker with nnsight's runner."""

    collect_nnsight = NNsightGPUWorker.collect_nnsight
    nnsight_request_count = NNsightGPUWorker.nnsight_request_count
    nnsight_register = NNsightGPUWorker.nnsight_register
    nnsight_clear_registered = NNsightGPUWorker.nnsight_clear_registered

    def init_device(self) -> None:
        """Set up as vLLM does, then swap the runner's class."""
        super().init_device()
        self.model_runner.__class__ = StockCPURunner

"""A worker that gives idle memory back soon, so that a test need not wait for a minute."""

from nnsight_lab.saves import slab
from nnsight_lab.worker.cpu import LabCPUWorker

IDLE_S = 1.0
KEEP_BYTES = slab.MIN_SLAB


class ImpatientCPUWorker(LabCPUWorker):
    """vLLM's CPU worker with blocks and little patience."""

    def init_device(self) -> None:
        """As ever; the pool is made later, with the model."""
        slab.IDLE_S, slab.KEEP_BYTES = IDLE_S, KEEP_BYTES
        super().init_device()

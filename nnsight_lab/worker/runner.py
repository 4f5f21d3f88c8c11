"""nnsight's model runner with this package's blocks, batching and way home.

The class is swapped onto the runner vLLM built, the seam nnsight itself uses; it adds behaviour
and no constructor state. What comes home is the codec's bytes: no pickle of data leaves a worker.
"""

from __future__ import annotations

from typing import Any

from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.tracing.tracer import _saves
from vllm.distributed.parallel_state import get_pp_group

from nnsight_lab.errors import CannotTravel
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.messages import BlockSaves, RequestSaves, SequenceSaves, WorkerError
from nnsight_lab.worker.batching import LabBatcher, LabInterleaver
from nnsight_lab.worker.caches import plain
from nnsight_lab.worker.requests import LabRequests


class LabRunner(NNsightGPUModelRunner):
    """A vLLM model runner in which blocks run."""

    nnsight_requests: LabRequests

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        interleaver = self.nnsight_model.interleaver
        interleaver.__class__ = LabInterleaver
        interleaver.spliced = {}
        interleaver.batcher = LabBatcher(None)
        self.nnsight_requests = LabRequests()
        self.nnsight_requests.interleaver = interleaver
        # A block names envoys of the kernel's tree by path; here they are this worker's own. Else
        # every block would carry the whole tree: 48 kB and 10 ms a request, measured.
        for envoy in self.nnsight_model.modules():
            self.nnsight_persistent_objects[f"Envoy:{envoy.path}"] = envoy

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # A module may be skipped in one step and never reach its output; nothing may linger.
        self.nnsight_model.interleaver.spliced.clear()
        return super().execute_model(*args, **kwargs)

    def lab_register(self, registration_id: str, payload: bytes, name: str) -> None:
        """Keep an edit's block for the requests that will name it."""
        self.nnsight_requests.register(registration_id, payload, self.nnsight_persistent_objects, name)

    def lab_clear(self, registration_ids: list[str]) -> None:
        """Forget edits; unknown ids are harmless."""
        for registration_id in registration_ids:
            self.nnsight_requests.unregister(registration_id)

    def lab_collect(self, ids: list[str], outputs: bytes | None) -> bytes:
        """Wind up finished requests and return what their blocks saved, as the codec's bytes.

        Args:
            ids: The requests, as the engine knows them; those not tracked here are passed over.
            outputs: The finished records by id, encoded, for blocks parked on ``tracer.result``.
        """
        records = decode(outputs) if outputs else {}
        reporting = get_pp_group().rank == 0
        collected = self.nnsight_requests.collect(set(ids), records, reporting)
        try:
            brought = [_plain(request) for request in collected]
            try:
                return encode(brought)
            except CannotTravel:
                return encode([_refused_apart(request) for request in brought])
        finally:
            saved = _saves()
            for request in collected:
                for sequence in request.sequences:
                    for block in sequence.blocks:
                        saved.difference_update(map(id, block.values.values()))


def _plain(request: RequestSaves) -> RequestSaves:
    """``request`` with the caches it saved as plain data."""
    sequences = tuple(
        SequenceSaves(
            sequence.index,
            tuple(
                BlockSaves(
                    block.block, {name: plain(value) for name, value in block.values.items()}, block.error
                )
                for block in sequence.blocks
            ),
        )
        for sequence in request.sequences
    )
    return RequestSaves(request.request_id, sequences, request.error)


def _refused_apart(request: RequestSaves) -> RequestSaves:
    """``request`` without the values that cannot travel, each refused as its own block's error."""
    sequences = []
    for sequence in request.sequences:
        blocks = []
        for block in sequence.blocks:
            values, error = {}, block.error
            for name, value in block.values.items():
                try:
                    encode(value)
                    values[name] = value
                except CannotTravel as refusal:
                    error = error or WorkerError("CannotTravel", f"{name}: {refusal}", (), False, (), ())
            blocks.append(BlockSaves(block.block, values, error))
        sequences.append(SequenceSaves(sequence.index, tuple(blocks)))
    return RequestSaves(request.request_id, tuple(sequences), request.error)

"""nnsight's model runner with this package's blocks, batching and way home.

The class is swapped onto the runner vLLM built, the seam nnsight itself uses; it adds behaviour
and no constructor state. What comes home is the codec's bytes: no pickle of data leaves a worker.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

from nnsight_lab import pins
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import SAVES_CONFIG
from nnsight_lab.worker import looking, peeking, stopping
from nnsight_lab.worker.batching import LabBatcher, LabInterleaver
from nnsight_lab.worker.courier import Courier
from nnsight_lab.worker.heap import Heap
from nnsight_lab.worker.requests import LabRequests


class LabRunner(NNsightGPUModelRunner):
    """A vLLM model runner in which blocks run."""

    nnsight_requests: LabRequests

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        pins.marks_by_block()
        stopping.listen()
        interleaver = self.nnsight_model.interleaver
        interleaver.__class__ = LabInterleaver
        interleaver.spliced = {}
        interleaver.batcher = LabBatcher(None)
        settings = (self.vllm_config.additional_config or {}).get(SAVES_CONFIG)
        # The rank over tensor and pipeline parallelism: each worker has slabs of its own.
        self.lab_rank = get_world_group().rank
        self.courier = Courier(settings, self.lab_rank, self.device)
        self.heap = Heap(on_cpu=self.device.type == "cpu")
        # Reads are gathered, so every rank of a tensor-parallel group holds the same values: one
        # moves them. Pipeline stages each answer for the layers they have.
        self.nnsight_requests = LabRequests(
            interleaver,
            self.courier,
            traces=get_pp_group().rank == 0,
            edits=get_tp_group().rank_in_group == 0,
        )
        # A block names envoys of the kernel's tree by path; here they are this worker's own. Else
        # every block would carry the whole tree: 48 kB and 10 ms a request, measured.
        for envoy in self.nnsight_model.modules():
            self.nnsight_persistent_objects[f"Envoy:{envoy.path}"] = envoy

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # A module may be skipped in one step and never reach its output; nothing may linger.
        self.nnsight_model.interleaver.spliced.clear()
        output = super().execute_model(*args, **kwargs)
        self.nnsight_requests.pack_ended()
        return output

    def lab_register(self, registration_id: str, payload: bytes, name: str) -> None:
        """Keep an edit's block for the requests that will name it."""
        self.nnsight_requests.register(registration_id, payload, self.nnsight_persistent_objects, name)

    def lab_clear(self, registration_ids: list[str]) -> None:
        """Forget edits; unknown ids are harmless."""
        for registration_id in registration_ids:
            self.nnsight_requests.unregister(registration_id)

    def lab_collect(self, ids: list[str], outputs: bytes | None, returned: bytes | None) -> bytes:
        """Wind up finished requests and return what their blocks saved, as the codec's bytes.

        Args:
            ids: The requests, as the engine knows them; those not tracked here are passed over.
            outputs: The finished records by id, encoded, for blocks parked on ``tracer.result``.
            returned: Pieces of shared memory the kernel no longer looks at.
        """
        if returned:
            self._take_back(returned)  # what is given up for it is told when lab_release is asked
        records = decode(outputs) if outputs else {}
        found = encode(self.nnsight_requests.collect(set(ids), records))
        self.nnsight_requests.settle()  # last: the copies go on while the message is written
        return found

    def lab_release(self, extents: bytes) -> list[str]:
        """Take back pieces of this rank's shared memory.

        Returns:
            The files given up since this was last asked, whatever for.
        """
        self._take_back(extents)
        self.heap.trim()  # asked between calls, where nobody waits for it
        return self.courier.given_up()

    def lab_slabs(self) -> dict[str, Any]:
        """This rank's shared memory in figures."""
        return self.courier.figures()

    def _take_back(self, extents: bytes) -> None:
        self.courier.release([e for e in decode(extents) if e.rank == self.lab_rank])

    def lab_look(self, asked: bytes) -> bytes:
        """A piece of a look, as the codec's bytes.

        Args:
            asked: The arguments of `looking.piece`, encoded.

        Returns:
            What it returns, and ``seconds``; or ``{"refused": why}``, since an exception here says nothing to
            the caller.
        """
        try:
            began = time.perf_counter()
            with torch.inference_mode():
                found = looking.piece(self.nnsight_model, **decode(asked))
                found = {name: value.cpu() for name, value in found.items()}
            return encode({**found, "seconds": time.perf_counter() - began})
        except Exception as error:
            return encode({"refused": f"{type(error).__name__}: {error}"})

    def lab_peek(self, asked: bytes) -> bytes:
        """What a running request's blocks have saved so far, as the codec's bytes.

        Args:
            asked: The arguments of `peeking.peek`, encoded.

        Returns:
            What it found; or ``{"refused": why}``, since an exception here says nothing to the caller.
        """
        try:
            return encode(peeking.peek(self.nnsight_requests, **decode(asked)))
        except Exception as error:  # a look at a request must not end the engine
            return encode({"refused": f"{type(error).__name__}: {error}"})

    def lab_free(self, ids: list[str]) -> None:
        """Forget requests that were aborted: what their blocks saved goes nowhere."""
        self.nnsight_requests.free(set(ids))

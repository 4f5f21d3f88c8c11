"""nnsight's model runner with this package's blocks, batching and way home.

The class is swapped onto the runner vLLM built, the seam nnsight itself uses; it adds behaviour
and no constructor state. What comes home is the codec's bytes: no pickle of data leaves a worker.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nnsight_lab import pins
from nnsight_lab.blocks.taps import resolved
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import SAVES_CONFIG
from nnsight_lab.wire.step_figures import PROMPT
from nnsight_lab.worker import jail, looking, peeking, stopping
from nnsight_lab.worker.aside import Aside
from nnsight_lab.worker.batching import LabBatcher, LabInterleaver
from nnsight_lab.worker.channel import Channel, pipelines_of
from nnsight_lab.worker.courier import Courier
from nnsight_lab.worker.declarations import Declarations
from nnsight_lab.worker.describing import modules_seen
from nnsight_lab.worker.elsewhere import StandIns, modules_here
from nnsight_lab.worker.graphs import TwoGraphs
from nnsight_lab.worker.greenlets import aside_of
from nnsight_lab.worker.heap import Heap
from nnsight_lab.worker.requests import LabRequests
from nnsight_lab.worker.stages import Stages
from nnsight_lab.worker.step_counts import asked_by
from nnsight_lab.worker.steps import Need, Steps
from nnsight_lab.worker.together import Together


class PipelineStage(GPUModelRunner):
    """Between vLLM's runner and nnsight's: the envoy tree is made of the whole model, on every stage."""

    stand_ins: StandIns | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        group = get_pp_group()
        if group.world_size > 1:
            model = self.get_model()
            seen: list[Any] = [None] * group.world_size
            dist.all_gather_object(seen, modules_here(model), group=group.cpu_group)
            self.stand_ins = StandIns(model, group.rank_in_group, seen)
            self.stand_ins.put_in()


class LabRunner(NNsightGPUModelRunner):
    """A vLLM model runner in which blocks run."""

    nnsight_requests: LabRequests
    model: Any
    stand_ins: StandIns | None
    #: Whether a step that a graph would replay is run with only taps serving, where there are no graphs.
    acts_replays = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        stages = self._stages()
        pins.marks_by_block()
        stopping.listen()
        interleaver = self.nnsight_model.interleaver
        interleaver.__class__ = LabInterleaver
        interleaver.taps = frozenset(resolved(tuple(interleaver.taps), self.nnsight_model._module))
        interleaver.prepare()
        if stages is not None:
            interleaver.stages, interleaver.passed_over = stages, stages.stand_ins.passed_over
        interleaver.batcher = LabBatcher(None)
        interleaver.together = Together()
        interleaver.aside = Aside(self.device) if self.device.type == "cuda" else None
        settings = (self.vllm_config.additional_config or {}).get(SAVES_CONFIG)
        # The rank over tensor and pipeline parallelism: each worker has slabs of its own.
        self.lab_rank = get_world_group().rank
        self.courier = Courier(settings, self.lab_rank, self.device)
        self.courier.aside = interleaver.aside
        self.heap = Heap(on_cpu=self.device.type == "cpu")
        self.steps = Steps(interleaver.taps, [envoy.path for envoy in self.nnsight_model.modules()])
        self.steps.stages = stages
        self._lab_in_step = False
        self.nnsight_requests = LabRequests(
            interleaver,
            self.courier,
            self.steps,
            # Every rank of a tensor-parallel group holds the same values, gathered: one moves them.
            answers=get_tp_group().rank_in_group == 0,
            stages=stages,
        )
        self.nnsight_requests.declared = Declarations(self.nnsight_model, self.vllm_config)
        if isinstance(self.model, BreakableCUDAGraphWrapper):
            self.model = TwoGraphs(self.model.runnable, self.vllm_config, interleaver)
        # A block names envoys of the kernel's tree by path; here they are this worker's own. Else
        # every block would carry the whole tree: 48 kB and 10 ms a request, measured.
        for envoy in self.nnsight_model.modules():
            self.nnsight_persistent_objects[f"Envoy:{envoy.path}"] = envoy
        if self.stand_ins is not None:
            self.stand_ins.settle()

    def _stages(self) -> Stages | None:
        if self.stand_ins is None:
            return None
        self.stand_ins.take_out()
        group = get_pp_group()
        everybody = get_world_group().cpu_group
        channel = Channel(pipelines_of(group.ranks, everybody), self.device)
        return Stages(self.stand_ins, channel, group.rank_in_group, group.world_size)

    def capture_model(self) -> Any:
        """Record the graphs, each of them twice (see `nnsight_lab.worker.graphs`)."""
        return super(NNsightGPUModelRunner, self).capture_model()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        interleaver = self.nnsight_model.interleaver
        # A module may be skipped in one step and never reach its output; nothing may linger.
        interleaver.spliced.clear()
        interleaver.stops = interleaver.hushed = False
        requests = self.nnsight_requests
        requests.need = None
        self._lab_in_step = True
        try:
            output = super().execute_model(*args, **kwargs)
        finally:
            self._lab_in_step = False
        self.steps.learn(interleaver.counts)
        if requests.stages is not None:
            requests.stages.forwarded()
        requests.pack_ended()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if self.nnsight_requests.stages is not None:
            self.nnsight_requests.stages.sampled()
        return output

    def _still_running(self) -> Any:
        """nnsight's; where no block has ended, nothing is sorted anew."""
        interleaver = self.nnsight_model.interleaver
        alive = [mediator for mediator in interleaver.mediators if mediator.worker]
        if len(alive) != len(interleaver.mediators):
            interleaver.mediators = alive
            interleaver.reindex()
        return interleaver

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """How vLLM runs this step; module by module where a block waits for what no replay serves."""
        interleaver = self.nnsight_model.interleaver
        if not self._lab_in_step or not interleaver.taps:
            return super()._determine_batch_execution_and_padding(*args, **kwargs)
        need, reason = self.steps.need(interleaver)
        if need is Need.HOOKS:
            kwargs["force_eager"] = True
        found = super()._determine_batch_execution_and_padding(*args, **kwargs)
        replays = found[0] != CUDAGraphMode.NONE
        if need is not Need.HOOKS and not replays:
            acted = self.acts_replays and kwargs["max_num_scheduled_tokens"] == 1
            interleaver.hushed = acted
            if not acted:
                need, reason = Need.HOOKS, PROMPT
        interleaver.stops = need is Need.TAPS
        self.nnsight_requests.need = need
        if need is Need.HOOKS and interleaver.mediators:
            self.steps.watch(interleaver.counts)
        if need is Need.HOOKS:
            if kwargs.get("max_num_scheduled_tokens", 1) > 1:
                reason = PROMPT  # whoever reads it: no graph would have run it
            asker = asked_by(self.nnsight_requests, interleaver.mediators, reason)
            self.steps.ran.ran_eagerly(reason, asker)
        else:
            self.steps.ran.ran(tapped=need is Need.TAPS)
        return found

    def lab_steps(self) -> dict[str, Any]:
        """How this rank's steps were run, in figures."""
        return self.steps.figures() | {"figures": encode(self.steps.ran.figures())}

    def lab_register(self, registration_id: str, payload: bytes, name: str) -> None:
        """Keep an edit's block for the requests that will name it."""
        self.nnsight_requests.register(registration_id, payload, self.nnsight_persistent_objects, name)

    def lab_declare(self, registration_id: str, payload: bytes, name: str) -> None:
        """Keep an edit that was told as data."""
        self.nnsight_requests.declare(registration_id, payload, name)

    def lab_trust(self, level: str, jailed: bool, uid: int | None) -> dict[str, str]:
        """Take no blocks of code any more, where the level says so; and close the jail."""
        declared = self.nnsight_requests.declared
        assert declared is not None
        declared.strict = declared.strict or level == "strict"
        on_gpu = self.device.type == "cuda"
        return jail.enter(uid, self.courier.folders, programs=on_gpu) if jailed else {}

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
        collected: list[Any] = [*self.nnsight_requests.collect(set(ids), records)]
        if self.steps.ran.graphs and self.lab_rank == 0:
            collected.append(self.steps.ran.figures())  # along with it, so that nobody need ask
        found = encode(collected)
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

    def lab_retire(self, paths: list[str]) -> list[str]:
        """Never write to these files of shared memory again; returns the files given up."""
        self.courier.retire(paths)
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
            with aside_of(self.nnsight_model.interleaver):  # where what blocks keep is
                return encode(peeking.peek(self.nnsight_requests, **decode(asked)))
        except Exception as error:  # a look at a request must not end the engine
            return encode({"refused": f"{type(error).__name__}: {error}"})

    def lab_describe(self) -> bytes:
        """The model's modules, as the codec's bytes."""
        with nullcontext() if self.stand_ins is None else self.stand_ins.whole():
            return encode(modules_seen(self.nnsight_model._module))

    def lab_free(self, ids: list[str]) -> None:
        """Forget requests that were aborted: what their blocks saved goes nowhere."""
        self.nnsight_requests.free(set(ids))

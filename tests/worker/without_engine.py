"""A worker's steps without a model: blocks are served logits and samples that the test made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from nnsight.modeling.vllm.vllm import VLLM
from nnsight.tracing.tracer import inc

from nnsight_lab import pins
from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.stubs import BlockEngine, block_tracer
from nnsight_lab.engine import driver
from nnsight_lab.engine.call import LabRequest
from nnsight_lab.engine.homecoming import Homecoming
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.worker.batching import LabBatcher, LabInterleaver
from nnsight_lab.worker.courier import Courier
from nnsight_lab.worker.peeking import peek
from nnsight_lab.worker.requests import LabRequests
from nnsight_lab.worker.runner import LabRunner
from nnsight_lab.worker.steps import Steps
from nnsight_lab.worker.together import Together

VOCABULARY = 40


class Tiny(torch.nn.Module):
    """Some modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def logits_of(request: str, step: int) -> torch.Tensor:
    """The logits of one request at its own step: ``[token]``, float32."""
    generator = torch.Generator().manual_seed(crc32(f"{request} {step}".encode()))
    return torch.randn(VOCABULARY, generator=generator)


class Worker:
    """The parts of a worker that serve blocks after the forward.

    Args:
        stacks: Whether one run of a block may serve many requests.
        folder: Where its shared memory is.
    """

    def __init__(self, folder: Any, *, stacks: bool) -> None:
        pins.marks_by_block()
        inc()
        interleaver: Any = LabInterleaver()
        interleaver.defer_exceptions = True
        self.model = VLLM(Tiny(), interleaver=interleaver)
        self.interleaver: Any = self.model.interleaver
        self.interleaver.batcher = LabBatcher(None)
        self.interleaver.together = Together()
        settings = {"memory_dir": str(folder), "spill_dir": str(folder), "spill_bytes": 0}
        settings |= {"name": f"without{int(stacks)}", "memory_bytes": 2**26}
        self.courier = Courier(settings, 0, torch.device("cpu"))
        steps = Steps(frozenset(), [])
        self.requests = LabRequests(self.interleaver, self.courier, steps, answers=True, stacks=stacks)
        self.requests._unpickled = lambda payload, persistent: self._blocks[payload]  # type: ignore[method-assign]
        self._blocks: dict[bytes, Block] = {}
        self.home = Homecoming(lambda pieces: [])
        self.home._ended.set()
        self.own_steps: dict[str, int] = {}
        self.samples: dict[str, list[int]] = {}

    def edit(self, name: str, source: str, **names: Any) -> None:
        """Install an edit."""
        captured = {"engine": BlockEngine(self.model), "tracer": block_tracer(self.model), "torch": torch}
        self._blocks[name.encode()] = Block(source, "cell", 1, {}, {**captured, **names})
        self.requests.register(name, name.encode(), {}, name)

    @torch.inference_mode()
    def step(self, rows: list[str], new: dict[str, list[str]] | None = None, **extra: Any) -> None:
        """One step of these requests in this order; ``new`` ones begin with it, and run these edits."""
        self.requests.add(
            [
                SimpleNamespace(
                    req_id=one,
                    sampling_params=SimpleNamespace(
                        extra_args={"lab_edits": edits, "lab_reach": "answers", **extra}
                    ),
                )
                for one, edits in (new or {}).items()
            ],
            {},
        )
        spans = [(one, 3 if one in (new or {}) else 1) for one in rows]
        self.requests.refuse_chunked(spans, {})
        self.interleaver.mediators = []
        with self.interleaver:
            self.requests.scope(self.model, spans)
            self.requests.unflatten(self.model)
        runner = SimpleNamespace(nnsight_model=self.model)
        numbers = [self.own_steps.get(one, 0) for one in rows]
        value = torch.stack([logits_of(one, at) for one, at in zip(rows, numbers, strict=True)])
        with LabRunner._still_running(runner):  # type: ignore[arg-type]
            value = type(self.model).logits.provide(self.model, value)
        samples = value.argmax(-1, keepdim=True)
        value.fill_(float("nan"))  # what a block keeps must be its own
        with LabRunner._still_running(runner):  # type: ignore[arg-type]
            type(self.model).samples.provide(self.model, samples)
        self.requests.record_saves()
        for one, at, sample in zip(rows, numbers, samples.flatten().tolist(), strict=True):
            self.own_steps[one] = at + 1
            self.samples.setdefault(one, []).append(sample)

    @torch.inference_mode()
    def collect(self, ids: list[str]) -> dict[str, Any]:
        """What these requests' blocks saved, by block and name, and their errors, as the kernel has it."""
        message = encode([*self.requests.collect(set(ids), {})])
        self.requests.settle()
        calls = [LabRequest(None, None, id=one) for one in ids]  # type: ignore[arg-type]
        steps: Any = SimpleNamespace(took=lambda found: None)
        driver.take(calls, [message], self.home, steps, late=True)
        found: dict[str, Any] = {}
        for call in calls:
            assert call.saves is not None
            for sequence in call.saves.sequences:
                for block in sequence.blocks:
                    error = block.error and (block.error.type_name, block.error.message, block.error.frames)
                    found.setdefault(call.id, {})[sequence.index, block.block] = dict(block.values), error
            if call.saves.error is not None:
                found.setdefault(call.id, {})["error"] = call.saves.error.type_name
        return found

    def peek(self, request: str, have: dict[str, dict[str, int]] | None = None) -> dict[str, Any]:
        """A look at a running request."""
        return peek(self.requests, request, have or {}, None, 2**20)

    @property
    def runs(self) -> int:
        """How many blocks run for many requests."""
        return 0 if self.requests.stacks is None else len(self.requests.stacks.runs)

    def close(self) -> None:
        """Give its memory back."""
        gone = self.home.returned()
        if gone is not None:
            self.courier.release(decode(gone))
        assert not self.requests.requests
        assert self.runs == 0
        self.courier.close()

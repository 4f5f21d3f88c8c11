"""What drives a vLLM engine: the interface of the two kinds, and what they share.

Each driver owns one thread for as long as the engine lives. That is not only for the loop: an
engine process asks to be terminated with its parent, and Linux takes the parent to be the *thread*
that created it. Callers never touch vLLM; they submit a `Call` and wait on its future, so an
interrupt reaches them at once whatever vLLM is doing.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_lab.engine.beside import Launch
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.homecoming import Homecoming, Parcel, Parcels
from nnsight_lab.engine.pace import Pace
from nnsight_lab.engine.step_watch import StepWatch
from nnsight_lab.saves.late import Late
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import RELEASE, STEPS
from nnsight_lab.wire.many import ManySaves
from nnsight_lab.wire.messages import BlockSaves, RequestRecord, RequestSaves, SequenceSaves
from nnsight_lab.wire.step_figures import StepFigures

if TYPE_CHECKING:
    from nnsight_lab.engine.model import LabVLLM

_RELEASE_S = 30.0


class Flight(NamedTuple):
    """The requests of an engine as its front end knows them: nothing is asked of a worker.

    Attributes:
        waiting: Sequences without a token yet: queued, or reading their prompt.
        running: Sequences that are generating.
        tokens: Generated so far, over the engine's life.
        blocks: About how many blocks of the KV cache the running ones hold.
    """

    waiting: int = 0
    running: int = 0
    tokens: int = 0
    blocks: int = 0


class Driver(abc.ABC):
    """Runs calls on one vLLM engine.

    Attributes:
        model: The envoy tree, once started.
    """

    model: LabVLLM
    #: Whether its workers keep a trace's block for the next call (see `nnsight_lab.engine.known_blocks`).
    keeps_blocks = True
    #: Whether what many saved alike is taken apart only when somebody looks at it.
    late_saves = True

    def __init__(self) -> None:
        #: Set when a start is given up: nothing may be spawned after that.
        self.given_up = threading.Event()
        #: What the threads of its start tell each other.
        self.launch = Launch(self.given_up)
        self.home = Homecoming(self._release)
        #: Seconds spent bringing saves home, over the engine's life.
        self.home_s = 0.0
        #: How fast its calls have been.
        self.pace = Pace()
        #: Tokens of its finished requests.
        self.generated = 0
        #: How its steps ran.
        self.steps = StepWatch(self.ask_steps, self.activity)

    def finished(self, output: Any) -> None:
        """Note the last output of a request."""
        self.generated += sum(len(completion.token_ids) for completion in output.outputs)

    def ask_steps(self) -> Future[Any]:
        """Ask the workers how steps ran."""
        return self.rpc(STEPS)

    def activity(self) -> object:
        """Equals what it was where no step was run in between."""
        return object() if self.unfinished() else self.generated

    def flight(self, block_size: int) -> Flight:
        """Its requests as they stand; cheap, and from any thread.

        Args:
            block_size: Tokens of one block of the KV cache.
        """
        processor = self.processor()
        states = () if processor is None else list(processor.request_states.values())
        waiting = running = blocks = 0
        tokens = self.generated
        for state in states:
            if state.is_prefilling:
                waiting += 1
                continue
            # None for requests that generate nothing.
            new = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
            running += 1
            tokens += new
            blocks += -(-(state.prompt_len + new) // block_size)
        return Flight(waiting, running, tokens, blocks)

    def came_home(self, began: float, opened_bytes: int) -> None:
        """Note a way home.

        Args:
            began: When, by ``time.perf_counter()``.
            opened_bytes: What ``home`` had opened before.
        """
        seconds = time.perf_counter() - began
        self.home_s += seconds
        self.pace.home(self.home.opened_bytes - opened_bytes, seconds)

    def _release(self, pieces: bytes) -> list[str] | None:
        """Send pieces of shared memory back to the workers."""
        if not self.running or self.dead():
            return None
        try:
            answers = self.rpc(RELEASE, pieces).result(timeout=_RELEASE_S)
        except Exception:  # an engine that is going down keeps nothing
            return None
        return [path for answer in answers for path in answer]

    @property
    @abc.abstractmethod
    def running(self) -> bool:
        """Whether the engine was built."""

    @abc.abstractmethod
    def processor(self) -> Any:
        """The output processor of vLLM, which knows every request; None before the engine was built."""

    @abc.abstractmethod
    def start(self, model: str, options: dict[str, Any]) -> Future[None]:
        """Begin building the engine on the driver's own thread."""

    @abc.abstractmethod
    def submit(self, call: Call) -> None:
        """Hand a call over; returns at once."""

    @abc.abstractmethod
    def abort(self, call: Call) -> Future[None]:
        """Abort what is left of a call and free what its blocks held in the workers."""

    @abc.abstractmethod
    def rpc(self, method: str, *args: Any) -> Future[list[Any]]:
        """Call a worker method on every rank."""

    @abc.abstractmethod
    def sleep(self) -> Future[None]:
        """Send the weights to the machine's memory, and drop the KV cache."""

    @abc.abstractmethod
    def wake(self) -> Future[None]:
        """Bring the weights back."""

    @abc.abstractmethod
    def dead(self) -> bool:
        """Whether a process of the engine has ended."""

    @abc.abstractmethod
    def unfinished(self) -> int:
        """How many requests are queued or running."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Shut the engine down; its processes may take a moment to go."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the driver's thread; only once its engine's processes are gone (they follow it)."""


def records(requests: Sequence[LabRequest]) -> bytes | None:
    """The finished records of requests whose blocks may read ``tracer.result``, encoded."""
    wanted = {r.id: RequestRecord.of(r.output) for r in requests if r.wants_result and r.output is not None}
    return encode(wanted) if wanted else None


def take(
    requests: Sequence[LabRequest],
    payloads: Sequence[bytes | None],
    home: Homecoming,
    steps: StepWatch,
    *,
    late: bool = False,
) -> None:
    """Give each request what the ranks collected for it; how steps ran comes along.

    The earliest rank that reports a value wins; under tensor parallelism one rank reports it, under
    pipeline parallelism each stage those that it has.
    """
    ranks: dict[str, list[RequestSaves | Opened]] = {}
    for payload in payloads:
        for found in decode(payload) if payload else ():
            if type(found) is StepFigures:
                steps.took(found)
            elif type(found) is ManySaves:
                for one in _each(found, home, late):
                    ranks.setdefault(one.saves.request_id, []).append(one)
            else:
                ranks.setdefault(found.request_id, []).append(found)
    for request in requests:
        receive(request, ranks.get(request.id, ()), home)


class Opened(NamedTuple):
    """What a rank collected for one request, opened.

    Attributes:
        saves: With its values.
        key: Sequence and block of what came through shared memory.
        parcel: That.
    """

    saves: RequestSaves
    key: tuple[int, str]
    parcel: Parcel


def receive(request: LabRequest, ranks: Sequence[RequestSaves | Opened], home: Homecoming) -> None:
    """Give a request what each rank collected for it."""
    merged: RequestSaves | None = None
    parcels: Parcels = {}
    for found in ranks:
        if type(found) is Opened:
            seen = found.saves
            parcels[found.key] = (*parcels.get(found.key, ()), found.parcel)
        else:
            assert isinstance(found, RequestSaves)
            seen = _opened(found, home, parcels)
        merged = seen if merged is None else _merged(merged, seen)
    request.saves, request.parcels = merged, parcels
    if request.shared:
        request.ranks = tuple(found for found in ranks if isinstance(found, RequestSaves))


def _each(many: ManySaves, home: Homecoming, late: bool) -> Iterator[Opened]:
    """What is told of many requests at once, of each of them."""
    for request_id, index, parcel in zip(many.requests, many.indices, home.open_many(many), strict=True):
        values: Any = Late(parcel.names, parcel.value) if late else parcel.value()
        sequence = SequenceSaves(index, (BlockSaves(many.block, values),))
        saves = RequestSaves(request_id, (sequence,), None, many.steps)
        yield Opened(saves, (index, many.block), parcel)


def _opened(saves: RequestSaves, home: Homecoming, parcels: Parcels) -> RequestSaves:
    """``saves`` with what was packed in shared memory opened; that is added to ``parcels``."""

    def opened(index: int, block: BlockSaves) -> BlockSaves:
        if block.packed is None:
            return block
        parcel, value = home.open(block.packed)
        parcels[index, block.block] = (*parcels.get((index, block.block), ()), parcel)
        return BlockSaves(block.block, {**block.values, **value}, block.error)

    return RequestSaves(
        saves.request_id,
        tuple(
            SequenceSaves(
                sequence.index,
                tuple(opened(sequence.index, block) for block in sequence.blocks),
            )
            for sequence in saves.sequences
        ),
        saves.error,
        saves.steps,
    )


def _merged(first: RequestSaves, second: RequestSaves) -> RequestSaves:
    """What two ranks saw of one request, both opened; ``first`` wins where both have it."""
    sequences = {s.index: s for s in first.sequences}
    for sequence in second.sequences:
        known = sequences.get(sequence.index)
        blocks = {b.block: b for b in (known.blocks if known else ())}
        for block in sequence.blocks:
            mine = blocks.get(block.block)
            if mine is None:
                blocks[block.block] = block
            else:
                # The first rank's names in its order, then what only the second has.
                values = {**mine.values, **{k: v for k, v in block.values.items() if k not in mine.values}}
                blocks[block.block] = BlockSaves(block.block, values, mine.error or block.error)
        sequences[sequence.index] = SequenceSaves(sequence.index, tuple(blocks.values()))
    ordered = tuple(sequences[index] for index in sorted(sequences))
    return RequestSaves(first.request_id, ordered, first.error or second.error, first.steps or second.steps)

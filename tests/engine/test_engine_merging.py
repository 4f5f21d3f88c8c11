"""What several ranks collected of one request becomes one: nothing dropped, the earliest rank first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_lab.engine.arrivals import Origin, arrivals
from nnsight_lab.engine.call import Call
from nnsight_lab.engine.config import EngineConfig
from nnsight_lab.engine.driver import take
from nnsight_lab.engine.homecoming import Homecoming
from nnsight_lab.engine.step_watch import StepWatch
from nnsight_lab.saves.slab import Place, SlabPool
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.messages import BlockSaves, RequestSaves, SequenceSaves, WorkerError
from nnsight_lab.wire.packed import Layout
from tests.waiting import until

SHM = Path("/dev/shm")


@dataclass
class Asked:
    """A request, as far as collecting knows it."""

    id: str = "r"
    saves: RequestSaves | None = None
    parcels: dict[Any, Any] = field(default_factory=dict)
    output: Any = None
    prompt: str = "p"
    edits: tuple[()] = ()
    traced: bool = False
    shared: bool = False
    ranks: tuple[RequestSaves, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Output:
    """A finished output, as far as a label knows it."""

    prompt: str = "p"
    prompt_token_ids: tuple[int, ...] = ()


class Ranks:
    """Workers without a model: each packs values into slabs of its own."""

    def __init__(self) -> None:
        self.pools = [SlabPool(f"merge{os.getpid()}", rank, [Place(SHM, 2**28)]) for rank in range(2)]
        self.home = Homecoming(self._release)

    def _release(self, pieces: bytes) -> list[str]:
        for piece in decode(pieces):
            self.pools[piece.rank].release([piece])
        return []

    def packed(self, rank: int, **values: Any) -> Any:
        layout = Layout.of(values, name="saves")
        extent = self.pools[rank].allocate(layout.nbytes)
        layout.copy_into(self.pools[rank].view(extent))
        return layout.packed(extent)

    def close(self) -> None:
        self.home.close()
        for pool in self.pools:
            pool.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()
    assert not list(SHM.glob(f"nnsight_lab.merge{os.getpid()}.*"))


def said(*blocks: BlockSaves, error: WorkerError | None = None) -> bytes:
    return encode([RequestSaves("r", (SequenceSaves(0, blocks),), error)])


def merged(ranks: Ranks, *payloads: bytes | None) -> Asked:
    request = Asked()
    steps = StepWatch(Future, lambda: None)
    take([request], payloads, ranks.home, steps)  # type: ignore[list-item]
    return request


def values_of(request: Asked, block: str = "probe") -> dict[str, Any]:
    assert request.saves is not None
    (sequence,) = request.saves.sequences
    (found,) = [b for b in sequence.blocks if b.block == block]
    return dict(found.values)


def test_stages_that_each_packed_something_are_merged_and_nothing_is_dropped(ranks: Ranks) -> None:
    early = said(BlockSaves("probe", {"count": 1}, None, ranks.packed(0, first=torch.zeros(3))))
    late = said(BlockSaves("probe", {"word": "x"}, None, ranks.packed(1, last=[torch.ones(2)])))
    request = merged(ranks, early, late)
    found = values_of(request)
    assert sorted(found) == ["count", "first", "last", "word"]
    assert torch.equal(found["first"], torch.zeros(3))
    assert torch.equal(found["last"][0], torch.ones(2))


def test_of_a_value_that_two_ranks_report_the_earliest_ones_is_taken(ranks: Ranks) -> None:
    for early, late in (
        (said(BlockSaves("probe", {"x": 1}, None)), said(BlockSaves("probe", {"x": 2}, None))),
        (
            said(BlockSaves("probe", {}, None, ranks.packed(0, x=1, t=torch.zeros(1)))),
            said(BlockSaves("probe", {}, None, ranks.packed(1, x=2, t=torch.ones(1)))),
        ),
    ):
        assert values_of(merged(ranks, early, late))["x"] == 1


def test_a_rank_that_has_nothing_to_say_changes_nothing(ranks: Ranks) -> None:
    alone = said(BlockSaves("probe", {"x": 1}, None))
    empty = encode([])
    for payloads in ((alone, None), (alone, empty), (empty, alone), (None, alone)):
        assert values_of(merged(ranks, *payloads)) == {"x": 1}


def test_blocks_and_errors_of_either_rank_are_there(ranks: Ranks) -> None:
    error = WorkerError("ValueError", "late")
    first = said(BlockSaves("a", {"x": 1}, None))
    second = said(BlockSaves("a", {}, error), BlockSaves("b", {"y": 2}, None))
    request = merged(ranks, first, second)
    assert request.saves is not None
    assert values_of(request, "a") == {"x": 1}
    assert values_of(request, "b") == {"y": 2}
    assert [block.error for block in request.saves.sequences[0].blocks] == [error, None]


def test_the_store_keeps_what_every_rank_brought_and_all_memory_comes_back(ranks: Ranks) -> None:
    import vllm.sampling_params  # noqa: F401  (an import keeps the frames it was made from, by errors inside)

    payloads = [
        said(BlockSaves("probe", {}, None, ranks.packed(rank, **{name: torch.full((4,), float(rank))})))
        for rank, name in enumerate(("first", "last"))
    ]
    request = merged(ranks, *payloads)
    request.output = Output()
    (arrival,) = arrivals(Call([request]), Origin("main", EngineConfig.of("m", "sync", {})))  # type: ignore[list-item]
    held = arrival.taken_apart()
    assert sorted(slot.name for slot in held.saves) == ["first", "last"]
    assert arrival.nbytes == sum(pool.used_bytes for pool in ranks.pools)
    del request, held, arrival
    until(lambda: [pool.used_bytes for pool in ranks.pools] == [0, 0], 3, "memory was not given back")

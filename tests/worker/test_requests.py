"""A worker's bookkeeping: what a step costs is bounded by what ended in it, not by what is tracked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent
from nnsight.intervention.interleaver import Event, Pending

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab.worker.courier import Parcel
from nnsight_lab.worker.greenlets import BlockMediator
from nnsight_lab.worker.requests import LabRequest, LabRequests
from nnsight_lab.worker.steps import Steps


class NotWalked(dict[str, Any]):
    """Tracked requests, to be looked up and never to be gone through."""

    def values(self) -> Any:
        raise AssertionError("all tracked requests were gone through")

    __iter__ = items = keys = values


class Packing:
    """A courier on a device, that notes whose values it packed."""

    overlaps = True

    def __init__(self) -> None:
        self.packed: list[dict[str, Any]] = []

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pack(self, values: dict[str, Any], *, allowed_bytes: int | None, share: str = "") -> Parcel:
        self.packed.append(values)
        return Parcel(values)


def tracking(requests: LabRequests, name: str, source: str) -> BlockMediator:
    """A request with one traced block, which is started and parks or ends."""
    block: Any = SimpleNamespace(glbls={}, lcls={"wait": wait}, presaved={"value"})
    request = LabRequest(name)
    request.mediator = requests._aboard(BlockMediator(block, compile(source, "b", "exec")), request)
    dict.__setitem__(requests.requests, name, request)
    request.mediator.start(None)
    return request.mediator


def wait() -> None:
    getcurrent().parent.switch(Pending(Event.VALUE, "somewhere", 0))


def test_packing_looks_at_the_blocks_that_ended_and_at_no_other() -> None:
    courier = Packing()
    requests = LabRequests(None, courier, Steps(frozenset(), ()), answers=True)  # type: ignore[arg-type]
    requests.requests = NotWalked()
    waiting = [tracking(requests, f"w{i}", "wait(); value = 1") for i in range(50)]
    tracking(requests, "done", "value = 2")
    requests.pack_ended()
    requests.pack_ended()
    assert courier.packed == [{"value": 2}]
    waiting[7].pending = waiting[7].switch(None)
    requests.pack_ended()
    assert courier.packed == [{"value": 2}, {"value": 1}]
    assert requests.ended == []


def test_a_block_that_ended_for_a_request_that_is_gone_is_passed_over() -> None:
    courier = Packing()
    requests = LabRequests(None, courier, Steps(frozenset(), ()), answers=True)  # type: ignore[arg-type]
    tracking(requests, "gone", "value = 1")
    requests.requests.clear()
    requests.pack_ended()
    assert courier.packed == []
    assert requests.ended == []


def test_on_a_cpu_nothing_is_noted_of_blocks_that_ended() -> None:
    courier = Packing()
    courier.overlaps = False
    requests = LabRequests(None, courier, Steps(frozenset(), ()), answers=True)  # type: ignore[arg-type]
    tracking(requests, "done", "value = 2")
    requests.pack_ended()
    assert requests.ended is None
    assert courier.packed == []

"""Which of a worker's requests run a block together, and what becomes of them where that does not work.

Requests that begin the same block in one step are one run of it (see `nnsight_lab.worker.stacked`), if the
block is fit for that and no other block of theirs writes what it reads. Where a run fails, each of its
requests gets a run of its own that begins with the step under way, and keeps what was saved before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nnsight.intervention.interleaver import Event

from nnsight_lab.worker.batching import READ_AT, private
from nnsight_lab.worker.greenlets import BlockMediator, aside_of
from nnsight_lab.worker.stacked import Seat, StackedRun, Unfit

if TYPE_CHECKING:
    from nnsight_lab.worker.requests import LabRequest, LabRequests

#: So many requests make a run.
_FEWEST: Final = 2


class Place(NamedTuple):
    """Where a request is in a step: its tokens, from which on and how many, and its row."""

    seat: Seat
    group: list[int]
    row: int


class Stacks:
    """The runs of a worker.

    Args:
        requests: Its requests.

    Attributes:
        runs: Those that go on.
        scheduled: Those that take part in the step under way.
    """

    def __init__(self, requests: LabRequests) -> None:
        self._requests = requests
        self.runs: list[StackedRun] = []
        self.scheduled: list[StackedRun] = []
        self._fresh: dict[int, list[Place]] = {}
        self._seated: dict[int, tuple[StackedRun, list[Seat], list[int]]] = {}

    # -- requests ------------------------------------------------------------------------------------

    def alone(self, request: LabRequest, seat: Seat) -> BlockMediator:
        """Give a request a run of its own of a block from now on."""
        mediator = seat.single()
        self._requests.put_aboard(mediator, request)
        request.riders[request.riders.index(seat)] = mediator
        request.copies = {key: mediator if one is seat else one for key, one in request.copies.items()}
        return mediator

    def leave(self, request: LabRequest) -> None:
        """A request is over, or will run no block."""
        for rider in request.riders:
            if type(rider) is Seat and rider.run is not None:
                rider.run.leave(rider)
                if not rider.run.seats and rider.run in self.runs:
                    self.runs.remove(rider.run)

    # -- steps ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget who took part in the last step."""
        self._fresh, self._seated = {}, {}

    def same_step(self) -> None:
        """A step with the same requests in the same rows."""
        self.scheduled = [run for run in self.scheduled if not run.over]
        for run in self.scheduled:
            run.ready()

    def seat(self, seat: Seat, group: list[int], row: int) -> None:
        """A request takes part; asked by row."""
        run = seat.run
        if run is None:
            self._fresh.setdefault(id(seat.template), []).append(Place(seat, group, row))
        elif id(run) in self._seated:
            _, seats, rows = self._seated[id(run)]
            seats.append(seat)
            rows.append(row)
        else:
            self._seated[id(run)] = (run, [seat], [row])

    def seated(self) -> list[Place]:
        """All were asked; those who need a run of their own, and where they are."""
        lonely: list[Place] = []
        aside = aside_of(self._requests.interleaver)
        for fresh in self._fresh.values():
            block = fresh[0].seat.template.stackable
            if len(fresh) < _FEWEST or block.unfit:
                lonely += fresh
                continue
            seats = [place.seat for place in fresh]
            run = StackedRun(block, seats)
            self.runs.append(run)
            run.seat(seats, [place.row for place in fresh], aside)
            self._seated[id(run)] = (run, [], [])
        self.scheduled = []
        for run, seats, rows in self._seated.values():
            if seats:
                run.seat(seats, rows, aside)
            if not run.over:
                self.scheduled.append(run)
        return lonely

    def wait_for(self, provider: str) -> bool:
        """Whether a run waits for this location."""
        read = READ_AT[provider]
        return any(run.waits_for(read) for run in self.scheduled)

    def serve(self, interleaver: Any, provider: str, value: Any) -> None:
        """Give the runs what they wait for; whose run fails waits for it by itself from now on."""
        read, total = READ_AT[provider], interleaver.batcher.total
        failed: list[StackedRun] = []
        taken: list[StackedRun] = []
        for run in self.scheduled:
            if not run.waits_for(read):
                continue
            try:
                if interleaver.fragmented(provider):
                    raise Unfit
                run.take(value, total)
                taken.append(run)
            except Exception:  # a rank's piece, no rows of the requests, or no memory for a copy of them
                failed.append(run)
        if interleaver.aside is not None:
            interleaver.aside.copied()
        for run in taken:
            try:
                run.go()
            except Exception:  # whatever it is, each request raises it at its own line, or does not
                failed.append(run)
        for run in failed:
            self._dissolve(run, read, interleaver)

    def _dissolve(self, run: StackedRun, read: str, interleaver: Any) -> None:
        """Have every request of a run go on by itself, from the beginning of the step under way."""
        requests = self._requests
        self.runs.remove(run)
        self.scheduled.remove(run)
        requests.changed = True
        # What the step has passed; what it is at is served next.
        before = [(at, f"model.{at}", value) for at, value in run.given if at != read]
        begun: list[BlockMediator] = []
        present = {id(seat): (place, row) for place, (seat, row) in enumerate(run.present)}
        for seat in run.seats.values():
            mediator = self.alone(requests.requests[seat.rider_of], seat)
            here = present.get(id(seat))
            if here is None:
                continue  # begins when it is back
            place, row = here
            mediator.batch_group, mediator.row = [row, 1], row
            begun.append(mediator)
            requests.begin(mediator, interleaver)
            for _, location, value in before:
                mediator.counts_at_start[location] = interleaver.counts.get(location, 0) - 1
                _hand_over(mediator, location, value[place])
        interleaver.mediators = _by_row([*interleaver.mediators, *begun])
        requests.scheduled = _by_row([*requests.scheduled, *begun])
        interleaver.reindex()


def _hand_over(mediator: BlockMediator, location: str, rows: Any) -> None:
    """Serve a block what the step has passed already."""
    while (pending := mediator.pending) is not None and pending.provider == location:
        if pending.event is not Event.VALUE or pending.iteration != mediator.occurrence(location) - 1:
            return
        try:
            mediator.pending = mediator.switch(private(rows))
        except Exception as exception:
            mediator.exception, mediator.pending = exception, None


def _by_row(mediators: list[Any]) -> list[Any]:
    return sorted(mediators, key=lambda mediator: mediator.batch_group[0])

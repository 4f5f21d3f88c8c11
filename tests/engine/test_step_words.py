"""What people are told of how steps ran, and that nobody waits for a worker to hear it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from nnsight_lab.engine.status import EngineStatus
from nnsight_lab.engine.step_watch import StepWatch
from nnsight_lab.engine.step_words import NO_GRAPHS, NO_GRAPHS_ON_CPU, RanSteps, counted, longest, reasons
from nnsight_lab.errors import ServerError
from nnsight_lab.wire.codec import encode
from nnsight_lab.wire.messages import RequestSaves
from nnsight_lab.wire.step_figures import FIRST, PROMPT, StepFigures

MLP = "model.model.layers.3.mlp.output"


def ran(*reasons: tuple[str, str, int], replayed: int = 0, tapped: int = 0) -> str:
    """The line of a request."""
    eager = sum(steps for _, _, steps in reasons)
    return str(RanSteps.of(StepFigures(True, replayed, tapped, eager, reasons)))


RAN = "steps ran module by module"
NO_TAP = "`model.layers.3.mlp.output` is not a tap"
WOULD = 'an engine started with taps=["model.layers.*.output", "model.layers.3.mlp.output"] would replay them'
NAMED = "which may lead to a module that is no tap"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ran((MLP, "trace", 64), (PROMPT, "", 1)), f"64 of 65 {RAN}: {NO_TAP}; {WOULD}"),
        (
            ran((MLP, "", 4), replayed=4),
            f"4 of 8 {RAN}: {NO_TAP} (another request asked for it); {WOULD}",
        ),
        (
            ran(("model.model.norm.output", "trace", 4)),
            f"4 of 4 {RAN}: `model.norm.output` is not a tap; an engine started with "
            'taps=["…", "model.norm.output"] would replay them',
        ),
        (ran((".mlp", "probe", 3), (PROMPT, "", 1)), f"3 of 4 {RAN}: the block names `.mlp`, {NAMED}"),
        (ran(("getattr", "probe", 3)), f"3 of 3 {RAN}: the block names `getattr`, {NAMED}"),
        (
            ran(("model.model.layers.1.skip", "probe", 2)),
            f"2 of 2 {RAN}: a module is skipped (`model.layers.1.skip`), which no replay can",
        ),
        (
            ran(("tracer.cache()", "trace", 5), (PROMPT, "", 1)),
            f"5 of 6 {RAN}: tracer.cache() sees every module; save what you need of taps instead",
        ),
        (ran((PROMPT, "", 1), tapped=64), "64 of 65 steps replayed, 64 of them stopping at taps"),
        (ran((FIRST, "", 1), (PROMPT, "", 1), replayed=8), "8 of 10 steps replayed"),
        (str(RanSteps.of(None, NO_GRAPHS_ON_CPU)), "no graphs on a CPU"),
    ],
)
def test_a_request_says_in_one_line_why_its_steps_did_not_replay(said: str, line: str) -> None:
    assert said == line


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert RanSteps.of(None) is None
    assert counted(None, "") == ""
    assert counted(None, NO_GRAPHS_ON_CPU) == NO_GRAPHS_ON_CPU
    assert counted(StepFigures(), "") == NO_GRAPHS
    assert longest([None]) is None
    rows = dict(EngineStatus("main", "ready", "demo", "sync").rows())
    assert not {"steps", "last call"} & rows.keys()


def test_an_engine_says_how_its_steps_ran_and_who_asked() -> None:
    told = (
        (MLP, "probe", 100), (PROMPT, "", 20), (".mlp", "trace", 6), ("tracer.cache()", "trace", 3),
        ("a barrier", "", 1),
    )  # fmt: skip
    figures = StepFigures(True, 1120, 60, 130, told)
    assert counted(figures, "") == "1,310: 1,120 replayed, 60 replayed with taps, 130 module by module"
    assert reasons(figures) == (
        "100 model.layers.3.mlp.output asked by edit probe; 20 with a prompt; 6 since the block of the trace "
        "names .mlp; 4 for other reasons"
    )
    assert reasons(figures, 9).endswith("; 3 tracer.cache() of the trace; 1 a barrier")
    assert counted(StepFigures(True), "") == "none yet"


def test_others_are_not_told_what_somebody_calls_their_edits() -> None:
    told = ((MLP, "secret", 3), (PROMPT, "", 2), (MLP, "hidden", 1))
    figures = StepFigures(True, 0, 0, 6, told).without_names()
    assert figures.reasons == ((MLP, "", 4), (PROMPT, "", 2))
    assert reasons(figures) == "4 model.layers.3.mlp.output; 2 with a prompt"


def test_an_older_kernel_is_sent_no_field_that_it_would_refuse() -> None:
    assert b"steps" not in encode(RequestSaves("r"))
    assert b"steps" in encode(RequestSaves("r", steps=StepFigures(True)))


class Worker:
    """A worker that is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []
        self.activity: object = 0
        self.watch = StepWatch(self._ask, lambda: self.activity)

    def _ask(self) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def answers(self, figures: StepFigures) -> None:
        self.asked[-1].set_result([{"figures": encode(figures)}])


def test_a_worker_that_hangs_is_asked_once_and_nobody_hangs_with_it() -> None:
    worker = Worker()
    worker.watch.took(StepFigures(True, 1))
    began = time.monotonic()
    for _ in range(3):
        assert worker.watch.look(0.05) == StepFigures(True, 1)
        assert worker.watch.look() == StepFigures(True, 1)
    assert time.monotonic() - began < 5
    assert len(worker.asked) == 1
    worker.answers(StepFigures(True, 2))
    assert worker.watch.look() == StepFigures(True, 2)


def test_an_engine_that_did_nothing_since_is_not_asked_again() -> None:
    worker = Worker()
    assert worker.watch.look() is None
    worker.answers(StepFigures(True, 2))
    for _ in range(3):
        assert worker.watch.look(0.05) == StepFigures(True, 2)
    assert len(worker.asked) == 1
    worker.activity = 1
    worker.watch.look()  # by one who does not wait: not that soon again
    assert len(worker.asked) == 1
    worker.watch.look(0.01)
    assert len(worker.asked) == 2


def test_a_server_that_does_not_tell_is_not_asked_again() -> None:
    worker = Worker()
    worker.watch.look()
    worker.asked[0].set_exception(ServerError("Not Found", status=404))
    worker.activity = 1
    assert worker.watch.look(0.05) is None
    assert len(worker.asked) == 1


def test_a_question_that_fails_costs_nothing() -> None:
    worker = Worker()
    worker.watch.took(StepFigures(True, 1))
    worker.watch.look()
    worker.asked[0].set_exception(RuntimeError("the worker is gone"))
    assert worker.watch.look(0.01) == StepFigures(True, 1)
    assert len(worker.asked) == 2

"""How steps ran, as a server tells it: to Prometheus, to users without names, to old kernels not at all."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from nnsight_lab.engine.call import LabRequest
from nnsight_lab.engine.step_watch import StepWatch
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.ledger import Ledger
from nnsight_lab.server.limits import Limits
from nnsight_lab.server.metrics import Figures
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.messages import RequestSaves
from nnsight_lab.wire.step_figures import StepFigures

SEEN = StepFigures(True, 50, 7, 3, (("model.model.layers.3.mlp.output", "secret", 3),))


class Asked:
    """A desk of which only steps are asked.

    Args:
        figures: What its engine's workers say; None where they hang.
    """

    def __init__(self, figures: StepFigures | None) -> None:
        self.driver = SimpleNamespace(steps=StepWatch(self._ask, object), dead=lambda: False)
        self.ledger = Ledger(Limits())
        self.turns = SimpleNamespace(taken=lambda user: 0, waiting=lambda user: 0)
        self.door = SimpleNamespace(lend=lambda *_: False)
        self._figures = figures

    def _ask(self) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._figures is not None:
            answer.set_result([{"figures": encode(self._figures)}])
        return answer


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONDITION, "state", "ready")


def told(desk: Any) -> dict[str, float]:
    """The steps on Prometheus's page, by kind."""
    family = next((one for one in Figures(desk).collect() if one.name == "nnsight_lab_steps"), None)
    return {} if family is None else {one.labels["kind"]: one.value for one in family.samples}


def test_prometheus_is_told_steps_by_kind_and_where_none_replays_nothing() -> None:
    kinds = {"replayed": 50, "replayed with taps": 7, "module by module": 3}
    assert told(Asked(SEEN)) == kinds
    assert told(Asked(StepFigures())) == {}


def test_prometheus_does_not_wait_for_workers_that_hang() -> None:
    desk = Asked(None)
    assert told(desk) == {}
    desk.driver.steps.took(SEEN)
    assert told(desk)["module by module"] == 3


@pytest.mark.usefixtures("ready")
def test_users_are_told_the_counts_and_nobodys_names() -> None:
    found = asyncio.run(Desk.steps(Asked(SEEN)))  # type: ignore[arg-type]
    assert (found.replayed, found.tapped, found.eager) == (50, 7, 3)
    assert found.reasons == (("model.model.layers.3.mlp.output", "", 3),)
    assert asyncio.run(Desk.steps(Asked(None))) == StepFigures()  # type: ignore[arg-type]


def test_a_kernel_that_does_not_know_of_steps_is_sent_none() -> None:
    request = LabRequest("", None)  # type: ignore[arg-type]
    request.saves = RequestSaves("r", steps=SEEN)
    asked = (0, request, "alice", "lease", "call")
    assert decode(encode(Desk._saves(Asked(None), *asked, True))).saves.steps == SEEN  # type: ignore[arg-type]
    old = encode(Desk._saves(Asked(None), *asked, False))  # type: ignore[arg-type]
    assert b"steps" not in old
    assert decode(old).saves.steps is None

"""Looking at a running request's lists: new elements only, within a bound, and nothing of it is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight_lab.engine.peeks import APART_S, MOST_BYTES, Peeks
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.worker.peeking import peek


class Tracked:
    """A tracked request as far as a look sees it."""

    def __init__(self, name: str, scope: dict[str, Any], saved: tuple[str, ...]) -> None:
        self.id = name
        self.names: dict[str, str] = {}
        self.copies: dict[str, Any] = {}
        self.mediator = SimpleNamespace(
            lcls=scope, marks={id(scope[one]) for one in saved}, presaved=set(), before={}
        )

    def named(self, ids: set[str]) -> bool:
        return self.id in ids

    def key(self, ids: set[str]) -> tuple[str, int]:
        return self.id, 0


def worker(*requests: Tracked) -> Any:
    tracked = {request.id: request for request in requests}
    return SimpleNamespace(requests=tracked, answers=lambda mediator: True)


def look(requests: Any, have: dict[str, int] | None = None, names: Any = None, most: int = 10_000) -> Any:
    found = peek(requests, "r", {TRACE_BLOCK: have or {}}, names, most)
    return decode(encode(found)).get(TRACE_BLOCK, {})


def test_only_saved_lists_of_that_request_are_looked_at() -> None:
    scope = {"saved": [1, 2], "other": [3], "tensor": torch.ones(3), "mine": [4]}
    requests = worker(
        Tracked("r", scope, ("saved", "tensor")), Tracked("s", {"mine": scope["mine"]}, ("mine",))
    )
    assert look(requests) == {"saved": {"first": 0, "items": [1.0, 2.0]}}
    assert look(requests, names=["other"]) == {}


def test_only_what_is_new_comes() -> None:
    requests = worker(Tracked("r", {"saved": [1, 2, 3]}, ("saved",)))
    assert look(requests, {"saved": 2}) == {"saved": {"first": 2, "items": [3.0]}}
    assert look(requests, {"saved": 3}) == {}


def test_numbers_come_exactly_and_the_list_is_not_touched() -> None:
    half = torch.tensor([1 / 3, 2.0], dtype=torch.bfloat16)
    saved = [half, torch.tensor([[2**40]])]
    found = look(worker(Tracked("r", {"saved": saved}, ("saved",))))["saved"]["items"]
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], half.float())
    assert found[1].tolist() == [[2**40]]
    assert saved[0] is half


def test_a_look_brings_no_more_than_its_bound_and_the_next_one_the_rest() -> None:
    requests = worker(Tracked("r", {"saved": [torch.ones(100)] * 10}, ("saved",)))
    first = look(requests, most=1_000)["saved"]
    assert len(first["items"]) == 2
    assert look(requests, {"saved": 2}, most=1_000)["saved"]["first"] == 2


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.ones(9_000), "too large to watch"),
        ("text", "it holds str"),
        (torch.ones(1, 1, 1), "a tensor of shape"),
        ([1], "it holds list"),
    ],
)
def test_what_cannot_be_watched_says_why(value: Any, why: str) -> None:
    assert why in look(worker(Tracked("r", {"saved": [value]}, ("saved",))))["saved"]["refused"]


# -- the engine's end ----------------------------------------------------------------------------------------


def answered(peeks: Peeks, **names: Any) -> None:
    peeks.question("r")
    peeks.took([encode({TRACE_BLOCK: names})])


def test_looks_are_apart_and_never_two_at_once() -> None:
    now = [0.0]
    peeks = Peeks(clock=lambda: now[0])
    assert peeks.due()
    peeks.question("r")
    now[0] += 10
    assert not peeks.due()
    peeks.took([encode({})])
    assert not peeks.due()
    now[0] += APART_S
    assert peeks.due()


def test_answers_add_up_and_an_old_one_is_passed_over() -> None:
    peeks = Peeks()
    answered(peeks, a={"first": 0, "items": [1.0, 2.0]})
    answered(peeks, a={"first": 0, "items": [1.0]})
    answered(peeks, a={"first": 2, "items": [3.0]}, b={"refused": "it holds str"})
    seen = {one.name: one for one in peeks.watched()}
    assert seen["a"].items == (1.0, 2.0, 3.0)
    assert seen["b"].refused == "it holds str"
    have = decode(peeks.question("r"))["have"][TRACE_BLOCK]
    assert have["a"] == 3
    assert have["b"] > 10**9  # it is not asked for again


def test_the_first_rank_that_has_a_list_says_what_is_in_it_and_a_failed_one_nothing() -> None:
    peeks = Peeks()
    peeks.question("r")
    one, other = ({TRACE_BLOCK: {"a": {"first": 0, "items": [n]}}} for n in (1.0, 2.0))
    peeks.took([encode({"refused": "KeyError: no"}), encode(one), encode(other), None])
    assert peeks.watched()[0].items == (1.0,)


def test_what_is_kept_for_the_eye_is_bounded() -> None:
    peeks = Peeks()
    for number in range(3):
        answered(peeks, a={"first": number, "items": [torch.ones(MOST_BYTES // 8 + 1)]})
    assert "the rest is shown when it is home" in peeks.watched()[0].refused

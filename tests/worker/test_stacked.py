"""One run of a block for many requests gives each what a run of its own would have given it.

Every schedule is run twice: by a worker that runs such blocks together, and by one that never does.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_lab.worker.stacks import Stacks
from tests.worker.without_engine import Worker, logits_of

#: What may be run together, beside sums that one kernel for many may add in another order.
MAXIMUM = """
best = list().save()
for _ in tracer.all():
    best.append(engine.model.logits[0].max())
"""
SEVERAL = """
ids = [].save()
scores = list().save()
for turn in tracer.iter[:]:
    row = engine.model.logits[0]
    wide = row.double()
    scores.append(wide.log_softmax(-1).topk(3).values)
    ids.append(engine.model.samples[0])
"""
CAPTURED = """
found = list().save()
for _ in tracer.all():
    found.append(engine.model.logits[:, places] @ direction)
"""
FIRST = """
twice = engine.model.logits[0] * 2
top = torch.topk(twice, 2).indices.save()
drawn = engine.model.samples.save()
"""
KEEPS = """
rows = [].save()
for _ in tracer.all():
    rows.append(engine.model.logits)
"""
TWICE = """
pairs = [].save()
for _ in tracer.all():
    pairs.append(engine.model.logits[0].max())
    pairs.append(engine.model.logits[0].min())
"""
#: What may not.
WRITES = """
engine.model.logits[0][3] = 50.0
"""
LATE_ERROR = """
best = list().save()
ids = list().save()
for _ in tracer.all():
    best.append(engine.model.logits[0].max())
    ids.append(table[engine.model.samples[0]])
"""
TOGETHER = {
    "maximum": MAXIMUM,
    "several": SEVERAL,
    "captured": CAPTURED,
    "first": FIRST,
    "keeps": KEEPS,
    "twice": TWICE,
}
NAMES = {"direction": torch.arange(1.0, 4.0), "places": [1, 5, 9], "table": torch.arange(40)}


@pytest.fixture
def workers(tmp_path: Any) -> Iterator[tuple[Worker, Worker]]:
    """A worker that runs blocks together, and one that does not."""
    one, other = Worker(tmp_path, stacks=True), Worker(tmp_path, stacks=False)
    for worker in (one, other):
        for name, source in {**TOGETHER, "writes": WRITES}.items():
            worker.edit(name, source, **NAMES)
    yield one, other
    gc.collect()
    for worker in (one, other):
        worker.close()


def same(a: Any, b: Any) -> bool:
    """Equal in kind and value; numbers to what a sum may differ by."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.allclose(a, b, rtol=1e-6) if a.is_floating_point() else torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def agree(workers: tuple[Worker, Worker], work: Callable[[Worker], Any]) -> Any:
    """What both give, which must be the same."""
    one, other = map(work, workers)
    assert same(one, other), f"\n{one}\n{other}"
    return one


def play(worker: Worker, lives: dict[str, tuple[int, int, list[str]]], away: dict[str, set[int]]) -> Any:
    """Requests by name: their first step, how many tokens, and their edits; and when they sit out."""
    found: dict[str, Any] = {}
    looks: list[Any] = []
    order = random.Random(3)
    left = {name: tokens for name, (_, tokens, _) in lives.items()}
    step = 0
    while left:
        here = [n for n in left if lives[n][0] <= step and step not in away.get(n, ())]
        order.shuffle(here) if step % 3 == 0 else here.sort(key=lambda n: (lives[n][0], n))
        new = {name: lives[name][2] for name in here if name not in worker.own_steps}
        if here:
            worker.step(here, new)
            looks.append(worker.peek(here[0]))
        ended = [name for name in here if left[name] == worker.own_steps[name]]
        if ended:
            found |= worker.collect(ended)
            for name in ended:
                del left[name]
        step += 1
    return found, looks


@pytest.mark.parametrize("name", TOGETHER)
def test_requests_of_one_length_get_what_each_alone_would(workers, name):
    lives = {f"r{i}": (0, 6, [name]) for i in range(9)}
    found, looks = agree(workers, lambda worker: play(worker, lives, {}))
    assert workers[0].interleaver.counts["model.logits"] == 6
    assert all(values for (_, values) in found["r4"].items())
    assert looks


def test_the_blocks_are_run_together_and_once(workers):
    one, other = workers
    for worker in workers:
        worker.step(["a", "b", "c"], {"a": ["maximum"], "b": ["maximum"], "c": ["maximum"]})
    assert (one.runs, other.runs) == (1, 0)
    assert one.interleaver.mediators == []
    assert one.requests.scheduled == []
    assert len(other.requests.scheduled) == 3
    found = one.collect(["a", "b", "c"])
    assert float(found["b"][0, "maximum"][0]["best"][0]) == float(logits_of("b", 0).max())
    other.collect(["a", "b", "c"])


def test_a_request_alone_runs_as_ever(workers):
    one, _ = workers
    one.step(["a"], {"a": ["maximum"]})
    assert one.runs == 0
    assert len(one.requests.scheduled) == 1
    one.collect(["a"])


@pytest.mark.parametrize("name", TOGETHER)
def test_requests_come_and_go_and_sit_steps_out(workers, name):
    lives = {f"r{i}": (i % 3, 2 + (5 * i) % 7, [name]) for i in range(11)}
    away = {"r2": {2, 3}, "r5": {4}, "r8": {1, 2, 5}, "r9": set(range(1, 12))}
    agree(workers, lambda worker: play(worker, lives, away))


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_any_edits_gives_the_same(workers, seed):
    chance = random.Random(seed)
    choice = [*TOGETHER, "writes"]
    lives = {
        f"r{i}": (chance.randrange(4), 1 + chance.randrange(9), chance.sample(choice, chance.randint(1, 3)))
        for i in range(14)
    }
    away = {name: set(chance.sample(range(12), chance.randrange(5))) for name in lives}
    agree(workers, lambda worker: play(worker, lives, away))


def test_two_edits_of_a_request_run_beside_each_other(workers):
    one, _ = workers
    lives = {f"r{i}": (0, 4, ["maximum", "several"] if i % 2 else ["several"]) for i in range(6)}
    agree(workers, lambda worker: play(worker, lives, {}))
    one.step(["a", "b"], {"a": ["maximum", "several"], "b": ["several", "maximum"]})
    assert one.runs == 2
    one.collect(["a", "b"])


def test_a_block_sees_what_the_request_s_other_block_wrote(workers):
    lives = {f"r{i}": (0, 3, ["writes", "maximum"] if i < 2 else ["maximum"]) for i in range(5)}
    found, _ = agree(workers, lambda worker: play(worker, lives, {}))
    best = [float(found[f"r{i}"][0, "maximum"][0]["best"][0]) for i in range(5)]
    assert best[:2] == [50.0, 50.0]
    assert max(best[2:]) < 50.0


def test_answers_of_one_request_are_each_their_own(workers):
    def work(worker: Worker) -> Any:
        rows = ["0_lab", "1_lab", "2_lab"]
        worker.step(rows, {key: ["maximum"] for key in rows})
        worker.step(rows)
        return worker.collect(["lab"])

    found = agree(workers, work)
    best = [found["lab"][i, "maximum"][0]["best"] for i in range(3)]
    assert [float(one[1]) for one in best] == [float(logits_of(f"{i}_lab", 1).max()) for i in range(3)]


def test_aborted_requests_leave_and_the_others_go_on(workers):
    def work(worker: Worker) -> Any:
        rows = [f"r{i}" for i in range(6)]
        worker.step(rows, {key: ["several"] for key in rows})
        worker.requests.free({"r1", "r4"})
        worker.step([one for one in rows if one not in ("r1", "r4")])
        worker.requests.free({"r0"})
        return worker.collect(["r2", "r3", "r5"])

    agree(workers, work)


def test_an_edit_that_is_cleared_runs_on_in_the_requests_that_have_it(workers):
    def work(worker: Worker) -> Any:
        worker.step(["a", "b"], {"a": ["maximum"], "b": ["maximum"]})
        worker.requests.unregister("maximum")
        worker.step(["a", "b"])
        return worker.collect(["a", "b"])

    found = agree(workers, work)
    assert len(found["a"][0, "maximum"][0]["best"]) == 2


def test_a_look_brings_what_was_not_there_at_the_last_one(workers):
    def work(worker: Worker) -> Any:
        rows = ["a", "b", "c"]
        worker.step(rows, {key: ["maximum"] for key in rows})
        worker.step(rows)
        seen = worker.peek("b"), worker.peek("b", {"maximum": {"best": 1}}), worker.peek("gone")
        worker.collect(rows)
        return seen

    whole, new, nothing = agree(workers, work)
    assert len(whole["maximum"]["best"]["items"]) == 2
    assert new["maximum"]["best"]["first"] == 1
    assert float(new["maximum"]["best"]["items"][0]) == float(logits_of("b", 1).max())
    assert nothing == {}


def test_an_error_is_each_request_s_own_at_its_line(workers):
    for worker in workers:
        worker.edit(
            "wrong", "best = [].save()\nfor _ in tracer.all():\n    best.append(engine.model.logits[7])\n"
        )

    def work(worker: Worker) -> Any:
        rows = ["a", "b", "c"]
        worker.step(rows, {key: ["wrong"] for key in rows})
        worker.step(rows)
        return worker.collect(rows)

    found = agree(workers, work)
    for one in "abc":
        values, (kind, _, frames) = found[one][0, "wrong"]
        assert values == {"best": []}
        assert kind == "IndexError"
        assert frames[-1].lineno == 3


def test_a_block_that_fails_at_a_later_step_keeps_what_it_had(workers):
    for worker in workers:
        worker.edit("late", LATE_ERROR, table=torch.arange(1000))
    rows = [f"r{i}" for i in range(5)]

    def work(worker: Worker) -> Any:
        table = worker.requests.templates["late"].block.lcls["table"]
        worker.step(rows, {key: ["late"] for key in rows})
        worker.step(rows[:4])  # the last one sits out what comes
        table.resize_(20)  # from now on tokens past it are out of bounds
        seen = [worker.runs]
        for _ in range(3):
            worker.step(rows[1:4])
            seen.append(worker.peek("r1"))
        worker.step(rows)
        return worker.collect(rows), seen[1:]

    found, _ = agree(workers, work)
    errors = [found[one][0, "late"][1] for one in rows]
    assert any(errors)
    assert any(samples >= 20 for samples in workers[0].samples["r1"])
    assert len(found["r4"][0, "late"][0]["best"]) == 2


def test_a_step_without_rows_for_the_requests_goes_the_single_way(workers, monkeypatch):
    from nnsight_lab.worker.stacked import StackedRun

    take = StackedRun.take
    calls = []

    def refusing(self: Any, value: Any, total: int) -> None:
        calls.append(total)
        take(self, value[:, 0] if len(calls) == 5 else value, total if len(calls) != 5 else -1)

    monkeypatch.setattr(StackedRun, "take", refusing)  # the samples of the third step
    lives = {f"r{i}": (0, 5, ["several"]) for i in range(4)}
    agree(workers, lambda worker: play(worker, lives, {"r1": {2}}))
    assert len(calls) == 5


def test_a_rule_that_gives_another_value_is_found_out(workers, monkeypatch):
    from nnsight_lab.worker import stacked

    of_all = stacked._of_all
    monkeypatch.setattr(stacked, "_of_all", lambda block, given: [1 + one for one in of_all(block, given)])
    lives = {f"r{i}": (0, 5, ["maximum"]) for i in range(4)}
    agree(workers, lambda worker: play(worker, lives, {}))
    one, _ = workers
    assert one.requests.templates["maximum"].stackable.unfit
    one.step(["a", "b"], {"a": ["maximum"], "b": ["maximum"]})
    assert one.runs == 0
    one.collect(["a", "b"])


def test_what_exceeds_a_request_s_budget_is_its_own_error(workers):
    def work(worker: Worker) -> Any:
        rows = ["a", "b", "c"]
        worker.step(rows, {key: ["keeps"] for key in rows}, lab_budget=100)
        return worker.collect(rows)

    found = agree(workers, work)
    assert found["a"][0, "keeps"][1][0] == "OverBudget"


def test_memory_of_those_who_left_is_let_go(workers):
    one, other = workers
    other.close = lambda: None  # type: ignore[method-assign]
    rows = [f"r{i}" for i in range(8)]
    one.step(rows, {key: ["keeps"] for key in rows})
    for _ in range(3):
        one.step(rows)
    stacks = one.requests.stacks
    assert isinstance(stacks, Stacks)
    (run,) = stacks.runs
    one.collect(rows[:6])
    one.step(rows[6:])
    assert [value[0].shape[0] for value in (stretch.values[0] for stretch in run.stretches)] == [2, 2]
    found = one.collect(rows[6:])
    assert [row.shape for row in found["r7"][0, "keeps"][0]["rows"]] == [(1, 40)] * 5
    assert torch.equal(found["r7"][0, "keeps"][0]["rows"][4][0], logits_of("r7", 4))

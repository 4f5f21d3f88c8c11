"""What a look at an engine costs, and what it says: with a real engine that has much to do."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.engine.recent import note_model, recent_models
from nnsight_lab.panel import known_models
from nnsight_lab.panel.snapshot import REQUESTS, Snapshots
from nnsight_lab.panel.surroundings import Surroundings
from nnsight_lab.wire import panel as wire
from tests.waiting import in_background, until

#: A page is told twice a second and asks every three: what a look may take of a processor for 1 % in all.
MOST_S = 0.01 / (2 + 1 / 3)


def test_a_look_at_a_busy_engine_costs_less_than_a_hundredth_of_a_processor(engine: Any) -> None:
    snapshots = Snapshots(Surroundings())
    done = in_background(lambda: engine.generate(["One two three"] * 60, max_tokens=200, ignore_eos=True))
    until(lambda: snapshots.take([]).engines[0].running >= 30, 60, "many running requests")
    spent = []
    for _ in range(100):
        began_s = time.thread_time()  # of this thread: what else the machine does is not asked
        told = asdict(snapshots.take([]))
        spent.append(time.thread_time() - began_s)
    assert told["engines"][0]["state"] == wire.BUSY
    done()
    assert statistics.median(spent) < MOST_S
    json.dumps(told)


def test_looking_up_the_saves_of_many_requests_costs_less_than_a_fiftieth_of_a_processor(engine: Any) -> None:
    with engine.trace(["One"] * 30, max_tokens=1):
        hidden = engine.model.model.layers[0].output[0].save()
    assert len(hidden) == 30
    snapshots = Snapshots(Surroundings())
    changes = snapshots.saves_changes()
    assert len({save.request_id for save in snapshots.take([], saves=True).saves}) == REQUESTS
    assert snapshots.saves_changes() == changes
    began_s = time.thread_time()
    for _ in range(10):
        asdict(snapshots.take([], saves=True))
    assert (time.thread_time() - began_s) / 10 < 3 / 50
    engine.saves.clear()
    assert snapshots.saves_changes() != changes


def test_tokens_are_counted_while_they_come_and_after(engine: Any) -> None:
    before = engine.flight().tokens
    seen: list[int] = []
    done = in_background(lambda: engine.generate(["One", "Two"], max_tokens=150, ignore_eos=True, n=2))
    until(
        lambda: seen.append(engine.flight().tokens - before) or 0 < seen[-1] < 600, 60, "some of the tokens"
    )
    done()
    assert engine.flight().tokens - before == 600
    assert engine.flight().running == engine.flight().waiting == engine.flight().blocks == 0


def test_models_to_choose_from_are_those_started_and_those_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert known_models.known_models() == ["demo"]
    (tmp_path / "hub" / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--x").mkdir()
    for model in ("a/b", "c/d", "a/b"):
        note_model(model)
    assert known_models.known_models() == ["a/b", "c/d", "demo", "Qwen/Qwen3-0.6B"]
    (tmp_path / "state" / "nnsight_lab" / "models.json").write_text("{damaged")
    assert known_models.known_models() == ["demo", "Qwen/Qwen3-0.6B"]


def test_a_start_by_any_way_is_among_the_recent_models_of_every_kernel(engine: Any, llama_path: Path) -> None:
    engine.edits.clear()
    note_model(str(llama_path))
    other = "import nnsight_lab.engine.recent as r; r.note_model('another/kernel'); print(r.recent_models())"
    told = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
    assert told.strip() == repr(recent_models())
    assert recent_models()[:2] == ["another/kernel", str(llama_path)]
    for number in range(20):
        note_model(f"many/{number}")
    assert len(recent_models()) == 10
    assert recent_models()[0] == "many/19"

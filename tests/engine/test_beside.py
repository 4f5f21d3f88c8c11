"""Work beside an engine's start: when it begins, what its error becomes, and that no start waits in vain."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

import nnsight_lab as lab
from nnsight_lab.engine.beside import Beside, Launch
from nnsight_lab.engine.model import LabVLLM
from nnsight_lab.errors import EngineStartFailed
from tests import models
from tests.waiting import OneEngine, owned


def test_the_work_begins_when_a_process_was_spawned_and_not_before() -> None:
    launch, began, go_on = Launch(), threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        assert go_on.wait(10)
        return "tree"

    beside = Beside(work, launch)
    assert not began.wait(0.05)
    launch.spawned.set()
    assert began.wait(10)
    go_on.set()
    assert beside.result() == "tree"
    assert not launch.failed.is_set()


def test_where_nothing_was_spawned_the_work_is_done_when_its_result_is_wanted() -> None:
    assert Beside(lambda: "tree", Launch()).result() == "tree"


def test_what_fails_is_told_at_once_and_is_the_results_error() -> None:
    def fail() -> None:
        raise ValueError("no such layer")

    launch = Launch()
    beside = Beside(fail, launch)
    launch.spawned.set()
    assert launch.failed.wait(10)
    with pytest.raises(ValueError, match="no such layer"):
        beside.result()
    assert isinstance(beside.drop(), ValueError)


def test_what_nobody_needs_any_more_is_not_begun() -> None:
    done: list[str] = []
    assert Beside(lambda: done.append("tree"), Launch()).drop() is None
    assert done == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what vLLM had opened when its start failed
def test_a_tree_that_cannot_be_built_ends_the_start_with_its_reason(
    one_engine: OneEngine, llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_engine.stop()
    phases: list[str] = []

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no layer of this kind on the meta device")

    monkeypatch.setattr(LabVLLM, "_load_meta", fail)
    with pytest.raises(EngineStartFailed, match=re.escape("no layer of this kind")) as raised:
        lab.start(
            str(llama_path),
            mode="sync",
            dtype="float32",
            max_model_len=models.CONTEXT,
            progress=lambda state: phases.append(state.phase),
        )
    assert raised.value.cause == "ValueError: no layer of this kind on the meta device"
    assert "loading the weights" not in phases, "it waited for the engine"
    assert owned() == []
    assert lab.engines() == {}

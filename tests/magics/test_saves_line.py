"""`%saves`: what is kept, written and found, from a line of a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_lab.errors import CellUsageError, EngineNotStarted, FileRefused
from tests.magics import fakes

COMMON = {"prompt": "The Eiffel Tower is in the city of light, and of much else", "model": "demo"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory and a list of written files of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def engine(lab: fakes.Lab) -> fakes.Engine:
    engine = lab.start("demo")
    engine.saves.put("lab-1a", [{"trace": {"hidden": torch.zeros(4, 8)}}], COMMON)
    engine.saves.put("lab-1b", [{"probe": {"rows": [torch.ones(2), torch.ones(2)]}}], COMMON)
    return engine


def test_the_newest_saves_are_listed_first(run: Any, engine: fakes.Engine) -> None:
    heads, first, second, rest = run("%saves").lines
    assert heads.split() == ["request", "block", "name", "shape", "dtype", "size", "prompt", "age"]
    assert first.split()[:7] == ["lab-1b", "probe", "rows", "[2]", "×", "2", "float32"]
    assert second.split()[:7] == ["lab-1a", "trace", "hidden", "[4,", "8]", "float32", "128"]
    assert "The Eiffel Tower is in the city of ligh…" in second
    assert rest.startswith("SavesStore: 2 requests")


def test_without_saves_and_without_an_engine_it_says_what_to_do(run: Any, lab: fakes.Lab) -> None:
    assert run("%saves").lines == [
        "No files of saves were found. %saves write PATH writes those of an engine's requests."
    ]
    lab.start("demo")
    assert run("%saves").lines[0].startswith("Engine main keeps no saves.")


def test_what_was_written_is_found_without_an_engine_and_read_by_name(
    run: Any, shell: Any, lab: fakes.Lab, engine: fakes.Engine, elsewhere: Path
) -> None:
    assert run("%saves write run/first").lines == [
        f"Wrote 2 requests to {elsewhere / 'run' / 'first.safetensors'}"
    ]
    lab.known.clear()
    listed = run("%saves").lines
    assert listed[0].split() == ["file", "requests", "saves", "size", "model", "age"]
    assert listed[1].split()[:3] == ["run/first.safetensors", "2", "2"]
    ran = run("f = %saves read run/first")
    assert "f = %saves read run/first" in ran.out
    assert shell.user_ns["f"].requests == ("lab-1a", "lab-1b")
    assert run("%saves files").lines == listed


def test_reading_takes_a_file_into_the_engines_store(run: Any, engine: fakes.Engine) -> None:
    run("%saves write one lab-1b")
    run("%saves drop all")
    assert len(engine.saves) == 0
    assert "Took 1 request from one.safetensors into engine main" in run("%saves read one").out
    assert engine.saves.get("lab-1b", "rows")[1].equal(torch.ones(2))


def test_requests_are_named_by_the_beginning_of_their_id(run: Any, engine: fakes.Engine) -> None:
    assert run("%saves keep lab-1a").lines == ["lab-1a: kept"]
    assert [request.kept for request in engine.saves] == [False, True]
    assert run("%saves drop lab-1b").lines == ["lab-1b: dropped"]
    assert run("%saves drop lab").lines == ["lab-1a: dropped"]
    assert run("%saves drop all").lines == ["Dropped 0 requests of engine main."]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%saves wriet x", "Did you mean 'write'? Write: %saves write PATH"),
        ("%saves write", "%saves write needs a path. Write: %saves write PATH [REQUEST …]"),
        ("%saves read", "%saves read needs a path"),
        ("%saves read a b", "b is not understood here. Write: %saves read PATH"),
        ("%saves keep", "%saves keep needs a request"),
        ("%saves drop", "Write: %saves drop REQUEST … (or all)"),
        ("%saves drop lab-1", "2 requests begin with 'lab-1': write more of the id."),
        ("%saves drop lab-2b lab-1a", "Nothing is kept of request 'lab-2b'. Did you mean 'lab-1b'?"),
        ("%saves write x nothing", "Nothing is kept of request 'nothing'."),
        ("%saves files engine=main", "engine= is not understood here"),
        ("%saves write /proc/nowhere/x", "/proc/nowhere/x cannot be written: "),
    ],
)
def test_a_wrong_line_is_one_line_with_the_correct_form(
    run: Any, engine: fakes.Engine, line: str, said: str
) -> None:
    ran = run(line)
    assert isinstance(ran.error, CellUsageError)
    assert len(ran.lines) == 1
    assert said in ran.out
    assert len(engine.saves) == 2


def test_what_cannot_be_read_is_refused_in_one_line_and_listed_with_the_reason(
    run: Any, engine: fakes.Engine, elsewhere: Path
) -> None:
    ran = run("%saves read nowhere")
    assert isinstance(ran.error, FileRefused)
    assert len(ran.lines) == 1
    run("%saves write cut")
    file = elsewhere / "cut.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (elsewhere / "weights.safetensors").write_bytes(b"somebody's model")
    lines = run("%saves files").lines
    assert len(lines) == 2
    assert lines[1].startswith("cut.safetensors")
    assert "refused: " in lines[1]


def test_nothing_is_written_of_an_empty_store_or_without_an_engine(run: Any, lab: fakes.Lab) -> None:
    assert isinstance(run("%saves write x").error, EngineNotStarted)
    lab.start("demo")
    ran = run("%saves write x")
    assert isinstance(ran.error, CellUsageError)
    assert "There is nothing to write: engine main keeps no saves." in ran.out
    assert not Path("x.safetensors").exists()


def test_another_engine_is_named_at_the_end(run: Any, lab: fakes.Lab, engine: fakes.Engine) -> None:
    lab.start("demo", name="second")
    assert "Engine second keeps no saves" in run("%saves").out
    assert "lab-1a" in run("%saves engine=main").out
    run("%saves drop all engine=main")
    assert len(engine.saves) == 0


def test_a_path_may_be_a_variable(run: Any, shell: Any, engine: fakes.Engine, elsewhere: Path) -> None:
    shell.user_ns["where"] = elsewhere / "a b"
    assert "Wrote 2 requests" in run("%saves write $where").out
    assert (elsewhere / "a b.safetensors").exists()
    assert "a b.safetensors" in run('%saves read "a b"').out

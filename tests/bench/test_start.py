"""What `nnsight-lab bench start` says of what it measured, and what it refuses; nothing is timed here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nnsight_lab.bench import start
from nnsight_lab.cli.main import main
from nnsight_lab.errors import EngineStartFailed


def one(first: float, second: float, **phases: float) -> dict[str, Any]:
    return {"import_s": first / 4, "first_s": first, "second_s": second, "phases": phases}


def test_ratios_are_within_a_round_and_phases_are_those_of_our_first_starts() -> None:
    found = start.summary(
        {
            "ours": [one(20, 10, spawning=6.0), one(44, 30, spawning=8.0, warming=1.0), one(22, 9)],
            "plain": [one(10, 10), one(40, 20), one(20, 10)],
        }
    )
    assert found["start_vs_plain"] == 1.1
    assert found["second_start_vs_plain"] == 1.0
    assert found["import_s"] == 5.5
    assert found["phases_s"] == {"spawning": 6.0, "warming": 0.0}
    assert found["seconds"]["plain"] == {"first": 20, "second": 10, "import": 5}
    assert found["rounds"] == 3


def test_both_modes_are_measured_with_the_options_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = []

    def child(kind: str, mode: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
        asked.append((kind, mode, path, options))
        return one(3, 2, spawning=1.0)

    monkeypatch.setattr(start, "_child", child)
    words = ["--model", str(tmp_path), "--rounds", "1", "load_format=dummy", "dtype=float32"]
    assert main(["bench", "start", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"start_vs_plain", "second_start_vs_plain", "import_s", "rows", "versions", "cpus"} == set(found)
    assert [row["mode"] for row in found["rows"]] == ["sync", "async"]
    assert all(0 < row["package_import_s"] < 60 for row in found["rows"])
    options = {"load_format": "dummy", "dtype": "float32", "max_model_len": 512}
    wanted = [(kind, mode) for mode in ("sync", "async") for kind in ("plain", "ours", "ours", "plain")]
    assert asked == [(kind, mode, str(tmp_path), options) for kind, mode in wanted]


def test_a_model_that_is_not_there_and_no_rounds_are_said_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    assert main(["bench", "start", "--model", str(tmp_path / "none")]) != 0
    assert "There is no model at" in capsys.readouterr().err
    assert main(["bench", "start", "--rounds", "0"]) != 0
    assert "--rounds is at least 1" in capsys.readouterr().err


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(EngineStartFailed, match=r"neither did not start: .*invalid choice"):
        start._child("neither", "sync", "nowhere", {})

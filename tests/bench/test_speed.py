"""What `nnsight-lab bench engine --speed` measures and says, of a model so tiny that figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnsight_lab.bench import speed
from nnsight_lab.cli.main import main
from tests.waiting import OneEngine

RATIOS = (
    "nothing_registered", "one_layer", "logits_every_token", "probe_every_token", "steer_every_token",
    "all_layers", "trace128", "single_stream",
)  # fmt: skip


def test_every_ratio_is_told_with_its_seconds_and_how_steps_ran(
    one_engine: OneEngine,
    llama_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_engine.stop()
    monkeypatch.setattr(speed, "_GOES_ON", {**speed._GOES_ON, "max_tokens": 4})
    said = ["bench", "engine", "--speed", "--json", "--scale=64", "--rounds=2", f"--model={llama_path}"]
    assert main([*said, "enforce_eager=True", "dtype=float32", "max_model_len=640"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name.removesuffix("_vs_plain") for name in found if name.endswith("_vs_plain")} == set(RATIOS)
    assert all(found[f"{name}_vs_plain"] > 0 for name in RATIOS)
    assert (found["rounds"], found["prompts"], found["long_prompts"]) == (2, 2, 1)
    assert found["seconds"].keys() == found["steps"].keys()
    assert {"plain", "steer", "trace", "all_layers"} < found["seconds"].keys()
    assert {"vllm", "nnsight"} <= found["versions"].keys()
    assert found["reasons"] == {}  # no step is counted where none could replay


def test_what_cannot_be_measured_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--speed", "not an option"]) != 0
    assert "write name=value" in capsys.readouterr().err

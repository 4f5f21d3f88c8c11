"""The measurement of the panel: it measures, with a page that is told of what happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import owned

PROGRAM = "import sys; from nnsight_lab.cli.main import main; sys.exit(main())"


@pytest.mark.notebook
@pytest.mark.engine
def test_a_small_measurement_gives_a_ratio_and_leaves_nothing(llama_path: Path, tmp_path: Path) -> None:
    before = {process.pid for process in owned()}
    words = ["bench", "panel", "--json", "--model", str(llama_path), "--prompts", "2", "--tokens", "4"]
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, "--rounds", "2"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["generate_with_panel_vs_without"] > 0
    assert found["saving_generate_with_panel_vs_without"] > 0
    # Each of the rounds with a page begins with a status.
    assert found["statuses"] >= 4
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert {process.pid for process in owned()} <= before

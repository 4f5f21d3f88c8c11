"""The quickstart notebook runs unchanged wherever it can be run, with the same results.

It asserts every claim it makes, so running it to its end is most of the test. A notebook's engine is async, a
script's is sync: what they print must be the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.notebook.kernels import ENGINE_ENVIRONMENT, ROOT, plain

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
LIMIT_S = 300
#: A saved notebook is read, compared and put under version control.
MAX_SAVED_BYTES = 60_000


class Finished(NamedTuple):
    """A process that has ended well.

    Attributes:
        stdout: What it printed, without colours.
        stderr: What it complained about.
    """

    stdout: str
    stderr: str


def run(arguments: Sequence[str | Path], folder: Path) -> Finished:
    environment = {**os.environ, **ENGINE_ENVIRONMENT}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Finished(plain(done.stdout), plain(done.stderr))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook: dict[str, Any]) -> list[str]:
    """The lines that the cells of an executed notebook printed."""
    texts = [
        "".join(output["text"])
        for cell in code_cells(notebook)
        for output in cell["outputs"]
        if output["output_type"] == "stream" and output["name"] == "stdout"
    ]
    return [line for line in "".join(texts).splitlines() if line.strip()]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quickstart as papermill leaves it."""
    folder = tmp_path_factory.mktemp("papermill")
    run(["-m", "papermill", "--no-progress-bar", "-k", "python3", QUICKSTART, "out.ipynb"], folder)
    notebook: dict[str, Any] = json.loads((folder / "out.ipynb").read_text("utf-8"))
    return notebook


def test_the_notebook_in_the_repository_is_clean() -> None:
    notebook = json.loads(QUICKSTART.read_text("utf-8"))
    assert [cell["outputs"] for cell in code_cells(notebook) if cell["outputs"]] == []
    assert {cell["execution_count"] for cell in code_cells(notebook)} == {None}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])


def test_papermill_runs_it(executed: dict[str, Any]) -> None:
    lines = printed(executed)
    assert "The model goes on with:  Paris, France." in lines
    assert "64 outputs, 64 different residual streams" in lines
    outputs = [output for cell in code_cells(executed) for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []


def test_a_saved_notebook_is_small_and_reads_without_a_kernel(executed: dict[str, Any]) -> None:
    assert len(json.dumps(executed)) < MAX_SAVED_BYTES
    shown = [
        output["data"]
        for cell in code_cells(executed)
        for output in cell["outputs"]
        if output["output_type"] in ("display_data", "execute_result")
    ]
    assert all(data["text/plain"] for data in shown)
    texts = ["".join(data["text/plain"]) for data in shown]
    # The last state stays, not the first.
    assert re.fullmatch(r"engine main: demo ready in [\d.]+ s \(async, \w+\)", texts[0])
    assert texts[1].startswith("The Eiffel Tower is in the city of Paris, France.")


def test_the_same_notebook_as_a_script_prints_the_same(executed: dict[str, Any], tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    run(["-m", "nnsight_lab", "export", QUICKSTART, "--out", script], tmp_path)
    lines = [line for line in run([script], tmp_path).stdout.splitlines() if line.strip()]
    missing = iter(lines)
    # In the same order; a script prints more, such as the status that a notebook displays.
    assert [line for line in printed(executed) if line not in missing] == []


def test_the_demo_command_runs_it(tmp_path: Path) -> None:
    done = run(["-m", "nnsight_lab", "demo"], tmp_path)
    assert done.stdout.splitlines()[-1] == "demo: ok"
    assert "engine main: demo ready in" in done.stdout
    assert "64 outputs, 64 different residual streams" in done.stdout


def test_every_cell_runs_where_workers_are_ray_actors(executed: dict[str, Any], tmp_path: Path) -> None:
    notebook = json.loads(QUICKSTART.read_text("utf-8"))
    [start] = [cell for cell in code_cells(notebook) if cell["source"][0].startswith("%engine start")]
    start["source"] = [start["source"][0].rstrip() + ' distributed_executor_backend="ray"']
    (tmp_path / "ray.ipynb").write_text(json.dumps(notebook), "utf-8")
    run(["-m", "papermill", "--no-progress-bar", "-k", "python3", "ray.ipynb", "out.ipynb"], tmp_path)
    mine = printed(json.loads((tmp_path / "out.ipynb").read_text("utf-8")))
    told = ("after layer", "steered:", "plain:", "The model goes on", "64 outputs")
    assert [one for one in mine if one.startswith(told)] == [
        one for one in printed(executed) if one.startswith(told)
    ]

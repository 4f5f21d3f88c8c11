"""The edit loop of `make lab-dev`: a changed source is built in seconds, into what JupyterLab serves.

It runs on a copy of the sources, so that what other tests use stays what it was.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from nnsight_lab.bench.jupyterlab import wait_until

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "labextension"
MODULES = SOURCES / "node_modules"
#: On an idle machine both take a second or two.
LIMIT_S = 90

pytestmark = pytest.mark.skipif(
    not (MODULES / "esbuild").exists() or shutil.which("node") is None, reason="no node and its modules here"
)


def test_a_changed_source_is_built_again_and_the_end_leaves_no_process(tmp_path: Path) -> None:
    copy = tmp_path / "labextension"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules", "build.log"))
    (copy / "node_modules").mkdir()
    for module in MODULES.iterdir():  # links, but for what the build writes
        if module.name != ".cache":
            (copy / "node_modules" / module.name).symlink_to(module)
    built = tmp_path / "nnsight_lab"

    def holds(folder: Path, words: str) -> bool:
        return any(words in path.read_text("utf-8", "replace") for path in folder.rglob("*.js"))

    with (tmp_path / "watch.log").open("w") as log:
        watch = subprocess.Popen(
            ["node", "build.mjs", "--watch"], cwd=copy, stdout=log, stderr=log, start_new_session=True
        )
        try:
            extension, widgets = built / "labextension", built / "widgets" / "static"
            wait_until(lambda: holds(extension, "Open a notebook:"), LIMIT_S, "the first build", tick_s=0.2)
            wait_until(lambda: holds(widgets, "From afar"), LIMIT_S, "the widgets' first build", tick_s=0.2)
            for folder, source, old in (
                (extension, copy / "src" / "lab" / "views" / "panel.ts", "Open a notebook:"),
                (widgets, copy / "src" / "widgets" / "heatmap.ts", "From afar"),
            ):
                source.write_text(source.read_text("utf-8").replace(old, "Changed just now:"), "utf-8")
                wait_until(lambda: holds(folder, "Changed just now:"), LIMIT_S, "the change", tick_s=0.2)  # noqa: B023
            assert (copy / "node_modules" / ".cache" / "nnsight-lab" / "development").exists()
            os.killpg(watch.pid, signal.SIGINT)  # Ctrl+C, which JupyterLab answers with a question
            children = Path(f"/proc/{watch.pid}/task/{watch.pid}/children").read_text("utf-8").split()
            assert watch.poll() is None
            assert children
        finally:
            watch.terminate()
            watch.wait(timeout=30)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10, "the builder's end")

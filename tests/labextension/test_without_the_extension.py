"""The package in a JupyterLab that has not its extension: everything works, and nothing is asked of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnsight_lab.bench.jupyterlab import Notebook, empty_notebook, open_page, serve, wait_until

pytestmark = pytest.mark.browser

CELL = """%load_ext nnsight_lab
import torch
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import SavesBrowser
store = SavesStore()
_ = store.put("request-1", [{"trace": {"hidden": torch.zeros(2, 3)}}], {"prompt": "Once"})
%engine list
SavesBrowser(store)"""


def test_a_kernel_with_the_package_needs_no_panel(tmp_path: Path, chromium: str) -> None:
    path = empty_notebook(tmp_path / "plain.ipynb")
    with (
        serve(tmp_path, path, extension=False) as server,
        open_page(server, path.name, chromium) as page,
    ):
        notebook = Notebook(page)
        notebook.finish(60)
        assert page.evaluate("jupyterapp.hasPlugin('nnsight-lab:panel')") is False
        notebook.run(CELL)
        wait_until(lambda: notebook.cells[-1]["execution_count"] is not None, 120, "the cell's end")
        notebook.finish(60)
        assert notebook.errors() == []
        output = page.locator(".jp-Notebook .jp-OutputArea").last
        wait_until(lambda: "No engine" in output.inner_text(), 20, "%engine's word")
        wait_until(lambda: "hidden" in output.inner_text(), 30, "the saves")
        page.screenshot(path=tmp_path / "without.png")

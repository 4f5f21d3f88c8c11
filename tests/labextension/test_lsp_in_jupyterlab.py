"""jupyterlab-lsp with a real language server reads our cells as Python: what is wrong is underlined, what we bind is not.

Both are put into a directory of their own, as every other JupyterLab of the tests would start a server too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import LABEXTENSION, empty_notebook, open_page, serve, wait_until
from tests.notebook.kernels import ROOT

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (LABEXTENSION / "package.json").exists(),
        reason="the JupyterLab extension is not built: scripts/setup.sh widgets",
    ),
]

WANTED = [
    "jupyterlab-lsp==5.3.0",
    "python-lsp-server==1.15.0",
    "python-lsp-jsonrpc==1.1.2",
    "docstring-to-markdown==0.17",
    "pyflakes==3.4.0",
    "importlib-metadata==8.7.0",
    "ujson==5.11.0",
    "zipp==3.23.0",
]
CELLS = [
    "import nnsight_lab as lab\n%load_ext nnsight_lab\n%engine start demo",
    '%%time\n%%trace ["a (",\n  "b"], max_tokens=4  # why\n'
    "layer = model.model.layers[3]\nhidden = lab.residual(layer.output).save()\n"
    "if wrong_in_trace:\n    tracer.stop()",
    "%%edit probe\nprint(edit.version, hidden.shape, wrong_in_edit)\ntracer.stop()",
    "engine.saves, wrong_outside",
]
WRONG = ["wrong_in_trace", "wrong_in_edit", "wrong_outside"]


@pytest.fixture(scope="module")
def language_server() -> Path:
    """The directory that has them, made if need be."""
    target = ROOT / ".venvs" / "lsp"
    done = target / ".done"
    if not done.exists() or done.read_text() != str(WANTED):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(target), *WANTED], check=True, timeout=300)
        done.write_text(str(WANTED))
    return target


@pytest.fixture
def page(
    language_server: Path, tmp_path: Path, chromium: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    notebook = empty_notebook(tmp_path / "lsp.ipynb")
    content = json.loads(notebook.read_text())
    (first,) = content["cells"]
    content["cells"] = [{**first, "id": f"cell{at}", "source": source} for at, source in enumerate(CELLS)]
    notebook.write_text(json.dumps(content))
    monkeypatch.setenv("JUPYTER_PATH", str(language_server / "share" / "jupyter"))
    path = os.pathsep.join([str(language_server), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        serve(tmp_path, notebook, {"PYTHONPATH": path}) as server,
        open_page(server, notebook.name, chromium) as page,
    ):
        yield page
        page.screenshot(path=tmp_path / "last.png")


def test_a_language_server_reads_our_cells_as_python(page: Any) -> None:
    underlined = page.locator(".jp-Notebook .cm-lintRange")
    wait_until(lambda: underlined.count() >= len(WRONG), 60, "what the language server says", tick_s=0.2)
    # pyflakes underlines one character past the name.
    assert [text.rstrip(":)") for text in underlined.all_inner_texts()] == WRONG

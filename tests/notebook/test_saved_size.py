"""What a notebook weighs that was worked in: the quickstart with every view, saved with its widgets' state.

A notebook is kept in git, mailed and opened in a browser. What takes the bytes is printed (``pytest -s``).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import Notebook, open_page, serve, wait_until
from nnsight_lab.widgets.base import STATIC
from tests.notebook.kernels import ENGINE_ENVIRONMENT, ROOT
from tests.widgets import access

pytestmark = [
    pytest.mark.browser,
    pytest.mark.engine,
    pytest.mark.skipif(
        not (STATIC / "heatmap.js").exists() or not access.AXE.exists(),
        reason="the widgets are not built: scripts/setup.sh widgets",
    ),
]

QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
RUN_ALL_LIMIT_S = 400
#: Measured 267 kB: 94 code of widgets (which ipywidgets saves once a widget), 57 a PNG that plotly's renderer
#: saves beside its figure, 53 html fallbacks, 31 the figure, 11 the cells.
MAX_SAVED_BYTES = 400_000
VIEWS = (
    "from nnsight_lab.widgets import Heatmap\nHeatmap(stream, name='stream', axes=['token', 'hidden'])",
    "Heatmap(logits, name='logits')",
    "lab.browse()",
    "tokens = [engine.tokenizer.decode([each]) for each in prompt_tokens]\n"
    "lab.token_strip(tokens, stream.float().norm(dim=-1), token_ids=prompt_tokens, score_name='norm')",
    "lab.plot.heatmap(stream.float(), tokens=tokens, dims=('position', 'hidden'))",
    "%edits",
    "%engine status",
)


def with_views(folder: Path) -> Path:
    """The quickstart with a cell for each view, before its engine is stopped."""
    book = json.loads(QUICKSTART.read_text("utf-8"))
    stop = next(n for n, cell in enumerate(book["cells"]) if "%engine status" in "".join(cell["source"]))
    book["cells"][stop:stop] = [
        {
            "cell_type": "code",
            "id": f"view-{n}",
            "metadata": {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for n, source in enumerate(VIEWS)
    ]
    path = folder / "quickstart.ipynb"
    path.write_text(json.dumps(book), "utf-8")
    return path


def weights(book: dict[str, Any]) -> Counter[str]:
    """The bytes of a notebook by what they are."""
    found: Counter[str] = Counter()
    for cell in book["cells"]:
        found["cells"] += len(json.dumps({**cell, "outputs": []}))
        for output in cell.get("outputs", []):
            for kind, data in output.get("data", {"stream": output.get("text", "")}).items():
                found[f"output {kind}"] += len(json.dumps(data))
    for kind in book["metadata"].get("widgets", {}).values():
        for model in kind["state"].values():
            for name, value in model["state"].items():
                part = name if name in ("_esm", "_css", "poster") else "the rest"
                found[f"state {part}"] += len(json.dumps(value))
            for buffer in model.get("buffers", []):
                found["state buffers"] += len(json.dumps(buffer))
    return found


def test_the_quickstart_with_every_view_saved_with_its_widgets_is_small(
    tmp_path: Path, chromium: str
) -> None:
    setting = tmp_path / "settings/@jupyter-widgets/jupyterlab-manager/plugin.jupyterlab-settings"
    setting.parent.mkdir(parents=True)
    setting.write_text(json.dumps({"saveState": True}))
    path = with_views(tmp_path)
    with serve(tmp_path, path, ENGINE_ENVIRONMENT) as server, open_page(server, path.name, chromium) as page:
        notebook = Notebook(page)
        notebook.run_all(RUN_ALL_LIMIT_S)
        notebook.finish(60)
        assert notebook.errors() == []
        drawn = page.locator(".nnl-heatmap[data-state=done], .nnl-browser")
        wait_until(lambda: drawn.count() >= 3, 30, "the widgets")
        access.prepare(page)
        assert access.problems(page, ".jp-Notebook .jp-OutputArea-output") == []
        saved = tmp_path / "root" / path.name
        notebook.save_to(saved)
        wait_until(
            lambda: "widgets" in json.loads(saved.read_text("utf-8"))["metadata"], 30, "a saved notebook"
        )
        text = saved.read_text("utf-8")
    found = weights(json.loads(text))
    for name, size in found.most_common():
        print(f"{size:>9,} {name}")
    print(f"{len(text.encode()):>9,} in all")
    assert found["state _esm"] > 0  # the state was saved
    assert len(text.encode()) <= MAX_SAVED_BYTES

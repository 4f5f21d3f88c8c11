"""The README and the notebooks as a newcomer runs them: all cells, in order, in one kernel with one engine.

A notebook asserts what its text claims, so running it to its end is most of its test. The README's blocks are
cells in a kernel that has nothing but what the blocks above have made, so a name that no block defines fails.
The engine is started by the README and found again by the notebooks, whose cells that stop it are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import ROOT, Kernel, Ran

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

NOTEBOOKS = ("01_looking_at_saves", "02_logit_lens")
SHARED = "04_shared_server"
#: What of one output is kept in a saved notebook; a table of saves or a figure is far below.
MAX_OUTPUT_BYTES = 500_000
STOP = "%engine stop"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks() -> list[str]:
    """The README's Python blocks, in order."""
    return _BLOCK.findall((ROOT / "README.md").read_text("utf-8"))


def notebook(name: str) -> dict[str, Any]:
    book: dict[str, Any] = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    return book


def cells(name: str) -> list[tuple[str, str]]:
    """The id and text of each code cell, but for the one that stops the engine."""
    found = [
        (cell["id"], "".join(cell["source"]))
        for cell in notebook(name)["cells"]
        if cell["cell_type"] == "code"
    ]
    assert found.pop()[1] == STOP
    return found


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(".".join(metadata.version("ipykernel").split(".")[:2]), tmp_path_factory.mktemp("books"))
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def readme(kernel: Kernel) -> list[tuple[str, Ran]]:
    """Each block of the README, and what came of it, in a kernel in which nothing was run before."""
    return [(block, kernel.run(block)) for block in blocks()]


def test_every_block_of_the_readme_runs_after_those_above_it(readme: list[tuple[str, Ran]]) -> None:
    assert len(readme) > 8
    failed = [f"{block}\n{ran.error}" for block, ran in readme if not ran.ok]
    assert failed == []
    assert [ran.stderr for _, ran in readme if ran.stderr] == []


def test_what_the_readme_says_of_its_blocks_is_so(kernel: Kernel, readme: list[tuple[str, Ran]]) -> None:
    assert kernel.value("lens.target_ranks is None and len(lens.layers)") == 30  # the last lens has no target
    assert kernel.value("tuple(stream.shape) == (len(lab.tokens(text)), model.config.hidden_size)")
    assert kernel.value("engine.tokenizer.decode([tokens.ids[1]]) == tokens[1]")
    assert kernel.value("label.module_path") == "model.layers[15].output"
    assert kernel.value("sorted(edit.name for edit in engine.edits)") == ["probe"]
    plain = next(ran for block, ran in readme if "__main__" in block)
    assert "Paris" in plain.stdout
    assert [text for text in plain.texts if text.startswith("engine main: demo already running")]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_to_its_end(
    name: str, kernel: Kernel, readme: list[tuple[str, Ran]], tmp_path: Path
) -> None:
    kernel.good(f"%reset -f\n%cd -q {tmp_path}")
    kernel.good("import nnsight_lab as lab\nlab.edits().clear()\nlab.saves().clear()")
    done = {}
    for cell, source in cells(name):
        ran = kernel.run(source)
        assert ran.ok, f"{cell}\n{ran.error}"
        assert ran.stderr == "", cell
        for shown in ran.shown:
            assert str(shown["text/plain"]).strip(), cell
            assert len(json.dumps(shown)) < MAX_OUTPUT_BYTES, cell
        done[cell] = ran
    CLAIMS[name](done)


def claims_of_saves(done: dict[str, Ran]) -> None:
    assert done["list-not-kept"].texts == [
        "'streams' was not kept: its items are saved, the list itself is not. Add the line "
        "`streams.save()` at the block's end."
    ]
    assert done["list-length"].stdout == "30 layers, each (9, 576)\n"
    assert done["labels"].stdout.count("model.layers[25].output | ") == 3
    assert done["edited"].stdout.splitlines() == ["[]  Paris, France.", "['to_rome']  Rome, Italy."]
    (heatmap,) = done["heatmap"].shown
    axes = heatmap["application/vnd.plotly.v1+json"]["layout"]
    assert axes["yaxis"]["title"]["text"] == "position (token)"
    assert axes["yaxis"]["ticktext"][:2] == ["The", "·E"]
    assert axes["xaxis"]["title"]["text"] == "hidden"
    assert "Not run: 3 of 3 requests would save more than their save_budget" in done["budget"].stdout


def claims_of_the_lens(done: dict[str, Ran]) -> None:
    """What the text says beyond what the cells assert."""
    assert "after layer 29:      0 tokens are likelier than ' Paris'" in done["ranks"].stdout
    assert done["several"].stdout.splitlines() == [
        "' Paris'  is on top from layer 28 on",
        "' Rome'   is on top from layer 29 on",
        "' Tokyo'  is on top from layer 29 on",
        "' cold'   is on top from layer 28 on",
    ]
    assert done["previous-best"].stdout.startswith("layer 16, head 0: ")
    assert done["looks"].stdout.startswith("head 0: ")


CLAIMS = {"01_looking_at_saves": claims_of_saves, "02_logit_lens": claims_of_the_lens}


def test_the_notebook_of_the_shared_engine_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel of its own: it starts an engine that outlives the kernel, and ends it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    kernel = Kernel(".".join(metadata.version("ipykernel").split(".")[:2]), tmp_path)
    try:
        done = {}
        for cell, source in [*cells(SHARED), ("stop", STOP)]:
            ran = kernel.run(source)
            assert ran.ok, f"{cell}\n{ran.error}"
            done[cell] = ran
    finally:
        kernel.run("for one in lab.kept(): lab.attach(one.name).stop()")  # where a cell failed
        kernel.close()
    assert done["edited"].stdout.splitlines() == ["['quiet'] ' wisk is' ['late']", "[] ' Paris, France' []"]
    assert done["steps"].stdout == "(1, 576)\n"
    assert done["complete"].stdout == "' wisk is' ' Paris, France'\n"
    assert done["saves"].stdout == "{'quiet/late': (1, 576)}\n"
    assert done["still"].stdout == "True []\n"
    assert "processes gone" in "".join(done["stop"].texts)


@pytest.mark.parametrize("name", [*NOTEBOOKS, SHARED])
def test_a_notebook_in_the_repository_is_clean_and_read_with_ease(name: str) -> None:
    book = notebook(name)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert book["metadata"] == {
        "kernelspec": {
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    assert all(cell["metadata"] == {} for cell in book["cells"])
    for cell in book["cells"]:
        lines = "".join(cell["source"]).splitlines()
        # What JupyterLab shows of a line of code beside its folders, on a screen of 1,200 pixels.
        assert max(map(len, lines)) <= (120 if cell["cell_type"] == "markdown" else 92), cell["id"]
        assert len(lines) <= 16, cell["id"]

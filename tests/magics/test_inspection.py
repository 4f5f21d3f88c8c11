"""Shift+Tab in a cell of ours: where it looks, and what it leaves to IPython."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_lab.magics.inspection import Inspection, _path_at


class Kernel:
    """As ipykernel's: it answers by itself."""

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        return {"status": "ok", "found": "known" in code, "data": {"text/plain": "IPython's"}, "metadata": {}}


@pytest.fixture
def ask(shell: Any) -> Any:
    shell.kernel = Kernel()
    inspection = Inspection(shell)
    inspection.load()

    def ask(marked: str) -> str:
        cell, at = marked.replace("|", "", 1), marked.index("|")
        answer = shell.kernel.do_inspect(cell, at, 0, ())
        return str(answer["data"]["text/plain"]) if answer["found"] else ""

    yield ask
    inspection.unload()
    assert "do_inspect" not in vars(shell.kernel)
    del shell.kernel


@pytest.mark.parametrize(
    ("marked", "path"),
    [
        ("x = model.layers[3].mlp.out|put[0].save()", "model.layers[3].mlp.output"),
        ("x = model.la|yers[3].mlp", "model.layers"),
        ("x = model.layers[3|].mlp", "model.layers[3]"),
        ("x = mod|el.layers[3]", "model"),
        ("|model.layers[3]", "model"),
        ("model.layers[i + 1].mlp|", "model.layers[i + 1].mlp"),
        ("f(a, model.mlp|)", "model.mlp"),
        ("tracer.stop(|)", "tracer.stop"),
        ("tracer.stop()|", "tracer.stop"),
        ("a = 1  |", ""),
        ("|", ""),
        ("(|", ""),
    ],
)
def test_the_path_is_the_one_that_the_cursor_stands_in(marked: str, path: str) -> None:
    assert _path_at(marked.replace("|", "", 1), marked.index("|")) == path


@pytest.mark.parametrize(
    ("marked", "said"),
    [
        ("%%trace 'a'\ntra|cer.stop()", "tracer: "),
        ("%%trace 'a'\ntracer.sto|p()", "stop()"),
        ("%%edit p\nedit|", "edit: EditShape, bound by this cell\n\nAn installed edit."),
        ("%%edit p\nedit.switch_off|()", "Requests do not run it; it stays installed."),
        ("%%edit p\nrows = 3\nif rows:\n    row|s", "rows: int, bound by this cell"),
        ("%%edit p, [\nedit.switch_off|(", "Requests do not run it"),
        ("%%trace 'a', max_tok|ens=3\nx", "%%trace"),
        ("%%edit pro|be\nx", "Leaves the cell's body on the engine"),
        ("known|", "IPython's"),
        ("%%trace 'a'\nknown|", "IPython's"),
        ("unheard|", ""),
    ],
)
def test_names_of_the_header_and_the_body_are_explained(ask: Any, shell: Any, marked: str, said: str) -> None:
    shell.user_ns["known"] = 1
    assert said in ask(marked)
    assert bool(said) == bool(ask(marked))


def test_it_runs_no_property_of_the_user(ask: Any, shell: Any) -> None:
    ran: list[str] = []

    # Not in a file: jedi reads one, and has no need to run what it can read.
    source = (
        "class Costly:\n    @property\n    def value(self):\n        ran.append('value')\n        return ''\n"
    )
    made: dict[str, Any] = {"ran": ran}
    exec(source, made)

    shell.user_ns["costly"] = made["Costly"]()
    ask("%%trace 'a'\nx = costly.value\nx|")
    assert ran == []

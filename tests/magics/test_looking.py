"""What a cell shows of its saves: chosen by the cell or for all cells, and nothing without a notebook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_lab.errors import CellUsageError
from nnsight_lab.magics import looking
from nnsight_lab.magics.calls import saves_calls
from nnsight_lab.magics.commands import read_saves
from nnsight_lab.magics.looking import CellViews, bind, shown_parts
from nnsight_lab.saves.store import SavesStore
from tests.magics import fakes


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be shown, in place of the showing."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(CellViews, "show", lambda self, *given: calls.append(given))
    return calls


@pytest.mark.parametrize(
    ("show", "parts"),
    [(True, (True, None)), (False, (False, False)), ("tokens", (True, False)), ("saves", (False, True))],
)
def test_a_cell_chooses_what_it_shows(show: Any, parts: Any) -> None:
    assert shown_parts(show) == parts


@pytest.mark.parametrize("show", ["token", 1, 0, None, [], "True"])
def test_what_cannot_be_shown_is_one_line_with_the_correct_forms(
    run: Any, shell: Any, lab: fakes.Lab, show: Any
) -> None:
    lab.start("demo")
    shell.user_ns["what"] = show
    ran = run("%%trace 'a', show=what\nx = 1\n")
    assert isinstance(ran.error, CellUsageError)
    assert len(ran.lines) == 1
    assert f"show={show!r} is not understood" in ran.out
    assert 'show="tokens"' in ran.out


def test_the_default_is_switched_by_a_line_and_a_cell_may_differ(
    run: Any, lab: fakes.Lab, shown: list[tuple[Any, ...]]
) -> None:
    lab.start("demo")
    run("%%trace 'a'\nx = 1\n")
    assert len(shown) == 1
    assert "show nothing" in run("%saves show off").out
    run("%%trace 'a'\nx = 1\n")
    run("%%trace 'a', show='tokens'\nx = 1\n")
    assert len(shown) == 1
    run("%%trace 'a', show='saves'\nx = 1\n")
    assert len(shown) == 2
    run("%saves show on")
    for quiet in ("%%trace 'a', show=False", "%%trace 'a', estimate=True", "%%capture\n%%trace 'a'", "1 + 1"):
        run(f"{quiet}\nx = 1\n")
    assert len(shown) == 2
    run("%%trace 'a'\nx = 1\n")
    assert len(shown) == 3  # a cell's own choice is forgotten with it


def test_a_terminal_shows_only_what_it_did_before(run: Any, lab: fakes.Lab, shell: Any) -> None:
    engine = lab.start("demo")
    engine.saves.put("r", [{"trace": {"h": torch.zeros(2)}}])
    assert "Saved" not in run("%%trace 'a'\nx = 1\n").out
    shell.user_ns["engine"] = engine
    assert run("engine.saves").out.startswith("Out[2]: <SavesStore: 1 requests")
    assert "browser" not in shell.user_ns


@pytest.mark.parametrize(
    "line", ["%saves show", "%saves show maybe", "%saves show on off", "%saves show engine=a"]
)
def test_a_wrong_switch_is_said(run: Any, lab: fakes.Lab, line: str) -> None:
    ran = run(line)
    assert isinstance(ran.error, CellUsageError)
    assert "Write: %saves show on|off" in ran.out


def test_a_script_has_no_line_for_it() -> None:
    assert saves_calls(read_saves("show off")) == []


def test_the_name_of_the_browser_is_never_taken_from_somebody() -> None:
    class Browser:
        bound = ""

    first, second = Browser(), Browser()
    namespace: dict[str, Any] = {}
    bind(first, namespace)  # type: ignore[arg-type]
    bind(second, namespace)  # type: ignore[arg-type]
    assert namespace["browser"] is second
    namespace["browser"] = "mine"
    third = Browser()
    bind(third, namespace)  # type: ignore[arg-type]
    assert (namespace["browser"], third.bound) == ("mine", "")


def test_nothing_of_it_is_left_when_the_extension_is_unloaded(bare_shell: Any) -> None:
    from nnsight_lab.magics.extension import load_ipython_extension, unload_ipython_extension

    formatter = bare_shell.display_formatter.mimebundle_formatter
    before = (dict(formatter.type_printers), dict(formatter.deferred_printers))
    for use in (False, True):
        load_ipython_extension(bare_shell)
        if use:
            bare_shell.display_formatter.format(SavesStore())
        unload_ipython_extension(bare_shell)
        assert (formatter.type_printers, formatter.deferred_printers) == before
    assert looking.in_notebook() is False

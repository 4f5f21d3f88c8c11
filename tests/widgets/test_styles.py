"""The widgets' style sheets: what one of them says is not heard by another that is on the same page.

Each widget brings its own sheet, and a page has them all at once. A rule for a class that two widgets use
(`.nnl-pane` was one) changes a widget by whether another is on the page, which no test of one widget sees.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "labextension/src/widgets"
#: What all may build on.
SHARED = ("theme", "heatmap")
SHEETS = sorted(path.stem for path in SOURCE.glob("*.css") if path.stem not in SHARED)


def code_of(name: str, seen: set[str] | None = None) -> str:
    """A module's text, with that of every module it imports."""
    seen = set() if seen is None else seen
    seen.add(name)
    text = (SOURCE / f"{name}.ts").read_text()
    imported = re.findall(r"from '\./(\w+)'", text)
    return text + "".join(code_of(one, seen) for one in imported if one not in seen)


def sheets_of(name: str) -> set[str]:
    """A sheet with those it imports."""
    text = (SOURCE / f"{name}.css").read_text()
    return {name}.union(*map(sheets_of, re.findall(r"@import './(\w+)\.css'", text)))


def outermost(name: str) -> set[str]:
    """The classes that rules of a sheet begin with: they alone say where a rule is heard."""
    text = re.sub(r"/\*.*?\*/|@import[^;]*;", "", (SOURCE / f"{name}.css").read_text(), flags=re.DOTALL)
    found: set[str] = set()
    for selectors in re.findall(r"([^{};]+)\{", text):
        outside = re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)", "", selectors)
        found.update(one.group() for part in outside.split(",") if (one := re.search(r"nnl-[\w-]+", part)))
    return found


@pytest.mark.parametrize("name", SHEETS)
def test_a_sheet_says_nothing_of_other_widgets(name: str) -> None:
    assert outermost(name)
    others = [one for one in SHEETS if name not in sheets_of(one)]
    for other in others:
        used = set(re.findall(r"nnl-[\w-]+", code_of(other)))
        assert outermost(name) & used == set(), f"{name}.css changes the widget {other}"


def test_a_rule_for_a_class_of_another_widget_is_seen() -> None:
    assert {"nnl-browser", "nnl-grid", "nnl-row"} <= outermost("browser")
    assert "nnl-pane" not in outermost("browser")
    assert "nnl-pane" in set(re.findall(r"nnl-[\w-]+", code_of("lens")))


def test_the_colours_of_all_views_are_said_in_one_place() -> None:
    # Every sheet holds `theme.css`: what another says of a variable is unsaid by the next sheet on the page.
    for path in SOURCE.glob("*.css"):
        set_there = set(re.findall(r"(?<![\w(-])(--nnl-[\w-]+)\s*:", path.read_text()))
        assert path.stem == "theme" or set_there == set(), path.name

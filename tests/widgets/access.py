"""What a page is asked about access: axe-core's rules, and a walk with the Tab key.

axe-core is a development dependency of ``labextension``; `scripts/setup.sh widgets` installs it. It sees
roles, names and contrasts. It cannot see whether the keyboard gets in, round and out, whether the focus
shows, and whether what is drawn on a canvas can be read, which is asked here.

The hard fact: JupyterLab's body hides what flows over and is no pixel high, since all in it is placed by
hand. axe-core takes such a page's texts for hidden, and passes them without a look; so the body is given a
height.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from nnsight_lab.bench.jupyterlab import Notebook

AXE: Final = Path(__file__).resolve().parents[2] / "labextension/node_modules/axe-core/axe.min.js"
_OURS: Final = Path(__file__).with_name("access.js")
_SERIOUS: Final = ("serious", "critical")


class Look(NamedTuple):
    """How a page is looked at: JupyterLab's theme, and what the system asks of pages."""

    theme: str
    media: dict[str, str]


_PLAIN: Final = {
    "forced_colors": "none",
    "contrast": "no-preference",
    "reduced_motion": "no-preference",
    "color_scheme": "light",
}
LOOKS: Final = {
    "light": Look("JupyterLab Light", {}),
    "dark": Look("JupyterLab Dark", {"color_scheme": "dark"}),
    "high-contrast": Look("JupyterLab Dark High Contrast", {"color_scheme": "dark", "contrast": "more"}),
    "more-contrast": Look("JupyterLab Light", {"contrast": "more"}),
    "forced-light": Look("JupyterLab Light", {"forced_colors": "active"}),
    "forced-dark": Look("JupyterLab Dark", {"forced_colors": "active", "color_scheme": "dark"}),
    "reduced-motion": Look("JupyterLab Light", {"reduced_motion": "reduce"}),
}


class Stop(NamedTuple):
    """A place where the Tab key stopped.

    Attributes:
        name: Its element and words.
        seen: How the focus shows there; empty where it does not.
        contrast: Of the focus's outline to what is behind it.
    """

    name: str
    seen: str
    contrast: float


def prepare(page: Any) -> None:
    """Loads into a page what it is asked with."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    page.evaluate(_OURS.read_text(encoding="utf-8"))
    page.evaluate("document.body.style.height = '100vh'")


def wear(page: Any, look: Look) -> None:
    """Has a page of JupyterLab looked at in another way, and waits until it is drawn so."""
    page.emulate_media(**{**_PLAIN, **look.media})
    Notebook(page).set_theme(look.theme)
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def problems(page: Any, *selectors: str) -> list[str]:
    """What axe-core finds serious or critical inside ``selectors``, one line for each element."""
    found = page.evaluate("selectors => axe.run({include: selectors.map(one => [one])})", list(selectors))
    looked = {rule["id"]: len(rule["nodes"]) for rule in found["passes"]}
    assert looked.get("color-contrast", 0) > 1, f"axe-core saw no text in {selectors}: {looked}"
    return [
        f"{rule['impact']} {rule['id']}: {node['html'][:160]} | {' '.join(node['failureSummary'].split())}"
        for rule in found["violations"]
        if rule["impact"] in _SERIOUS
        for node in rule["nodes"]
    ]


def reachable(root: Any) -> list[str]:
    """The names of what the Tab key should reach inside an element, in order."""
    return list(root.evaluate("root => walked.reachable(root)"))


def walk(page: Any, root: Any, *, backward: bool = False) -> list[Stop]:
    """The stops of the Tab key from before an element to behind it, or the other way.

    Raises:
        AssertionError: The key did not come out again.
    """
    first, last = ("walk-after", "walk-before") if backward else ("walk-before", "walk-after")
    stops: list[Stop] = []
    root.evaluate("root => walked.fence(root)")
    try:
        limit = len(reachable(root)) + 5
        page.locator(f"#{first}").focus()
        for _ in range(limit):
            page.keyboard.press("Shift+Tab" if backward else "Tab")
            if page.evaluate("document.activeElement.id") == last:
                return stops
            stops.append(Stop(*page.evaluate("walked.stop()")))
        raise AssertionError(f"the Tab key is caught: {[stop.name for stop in stops]}")
    finally:
        page.evaluate("walked.unfence()")


def edge_contrast(canvas: Any) -> float:
    """The contrast of the text under a picture, at its strongest pixel, to what is behind it."""
    return float(canvas.evaluate("canvas => walked.edge(canvas)"))


def head_contrast(canvas: Any) -> float:
    """The contrast of a drawn table's row heads to what is behind them; 0 where that is not the page's."""
    return float(canvas.evaluate("canvas => walked.heads(canvas)"))

"""The panel and what belongs to it in JupyterLab's themes and a system's modes: photographed, and asked by axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.widgets import access

PANEL: Final = "#nnsight-lab-panel"
#: What this extension puts on a page that may be there at any time.
OURS: Final = (PANEL, ".nnlab-statusbar", ".nnlab-badge", "[data-jp-item-name='nnsight-lab']")
#: The last one stays on.
BOTH: Final = ("dark", "light")
EVERY: Final = ("high-contrast", "forced-dark", "dark", "forced-light", "reduced-motion", "light")


def look_at(page: Any, folder: Path, name: str, *roots: str, looks: tuple[str, ...] = BOTH) -> None:
    """Leaves a screenshot of each look, and has axe-core find nothing serious in any.

    Args:
        page: JupyterLab's.
        folder: Where the screenshots go.
        name: What they are called.
        *roots: What is looked at; where there is none, all that is on the page of `OURS`.
        looks: Of `access.LOOKS`.
    """
    if not page.evaluate("'walked' in window"):  # another page, or the same loaded again
        access.prepare(page)
    there = [root for root in roots or OURS if page.locator(root).count()]
    found = []
    for look in looks:
        access.wear(page, access.LOOKS[look])
        page.wait_for_selector("#jupyterlab-splash", state="detached")
        page.screenshot(path=folder / f"{name}-{look}.png")
        found += [f"{look}: {problem}" for problem in access.problems(page, *there)]
    assert found == [], "\n".join(found)


def focus_shows(page: Any, root: str) -> list[str]:
    """Walks a part with the Tab key; everything that should be reached is, and is seen to have the focus.

    Returns:
        The names of the stops.
    """
    for look in ("forced-dark", "high-contrast", "dark", "light"):
        access.wear(page, access.LOOKS[look])
        stops = access.walk(page, page.locator(root).first)
        assert [stop.name for stop in stops] == access.reachable(page.locator(root).first)
        for stop in stops:
            assert stop.seen, f"{look}: {stop.name}"
            assert stop.contrast >= 3, f"{look}: {stop}"  # WCAG 2.2, 1.4.11
    return [stop.name for stop in stops]

"""How figures sit on a page: no background of their own, and text that is read on the page's.

A kernel cannot know whether its notebook is shown on white or on black, and a saved figure is looked at on
both. So ``"auto"`` writes in a grey between them (contrast above 4 on JupyterLab's light and dark pages);
``"light"`` and ``"dark"`` are stronger, for one page.
"""

from __future__ import annotations

from typing import Final

import plotly.graph_objects as go

from nnsight_lab.errors import PlotRefused, nearest
from nnsight_lab.lens.palette import LINES, SEQUENTIAL

#: Text, and lines that stay in the background.
_INKS: Final = {
    "auto": ("#777777", "rgba(128,128,128,0.25)"),
    "light": ("#1f1f1f", "rgba(0,0,0,0.13)"),
    "dark": ("#e6e6e6", "rgba(255,255,255,0.17)"),
}
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONOSPACE: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def ink(theme: str) -> str:
    """The colour of a theme's text."""
    return _INKS[checked(theme)][0]


def checked(theme: str) -> str:
    """The theme, if there is such a one."""
    if theme not in _INKS:
        raise PlotRefused(f"theme={theme!r} is not known.{nearest(theme, _INKS)}")
    return theme


def template(theme: str = "auto") -> go.layout.Template:
    """A plotly template for ``"auto"``, ``"light"`` or ``"dark"`` pages; also for figures of your own."""
    text, faint = _INKS[checked(theme)]
    axis = {
        "gridcolor": faint,
        "linecolor": faint,
        "tickcolor": faint,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8},
    }
    colorbar = {"outlinewidth": 0, "thickness": 12, "ticks": "outside", "ticklen": 3, "tickcolor": faint}
    heatmap = go.Heatmap(colorscale=list(SEQUENTIAL), colorbar=colorbar)
    layout = go.Layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": text},
        title={"x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 12}, "font": {"size": 15}},
        colorway=list(LINES),
        xaxis=axis,
        yaxis=axis,
        coloraxis={"colorbar": colorbar},
        hoverlabel={"align": "left", "font": {"family": MONOSPACE, "size": 12}},
        legend={"bgcolor": "rgba(0,0,0,0)"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": faint, "activecolor": text},
    )
    return go.layout.Template(layout=layout, data={"heatmap": [heatmap]})

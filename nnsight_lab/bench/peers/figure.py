"""The report as a figure: for each work a bar a peer, how many times plain vLLM's time it takes.

Ratios span two decades, so the scale is logarithmic, and bars begin at 1, where plain vLLM is: downward is
faster. A work without a number has no bar; why stands in the table.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go

from nnsight_lab.bench.jupyterlab import find_chromium
from nnsight_lab.bench.peers.environments import peers
from nnsight_lab.bench.peers.report import OURS, PLAIN
from nnsight_lab.bench.peers.works import Work
from nnsight_lab.errors import BenchRefused
from nnsight_lab.lens.palette import LINES
from nnsight_lab.plots.figure import finished

KINDS: Final = (".html", ".png", ".json")
_SIZE: Final = (1180, 560)
_DRAW_S: Final = 60
#: What is asked of a work, as there is room for it.
_ASKED: Final = {
    "nothing asked": "nothing",
    "one layer saved": "save",
    "one layer steered at every token": "steer",
    "all layers saved, last token": "last rows",
    "all layers saved": "all layers",
}
_TICKS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def figure(found: dict[str, Any], theme: str = "light") -> go.Figure:
    """Bars of ratios.

    Args:
        found: A report.
        theme: ``"auto"``, ``"light"`` or ``"dark"``.
    """
    # Ours first, in the palette's first colour.
    known = sorted(
        (peer for peer in peers().values() if peer.name != PLAIN), key=lambda peer: peer.name != OURS
    )
    works = {name: Work(**work) for name, work in found["works"].items()}
    rows = {(row["peer"], row["work"]): row for row in found["rows"]}
    drawn = go.Figure(layout={"template": None})
    ratios = []
    for place, peer in enumerate(known):
        mine = {name: rows.get((peer.name, name), {}).get("ratio") for name in works}
        if not any(mine.values()):
            continue
        ratios += [ratio for ratio in mine.values() if ratio]
        drawn.add_trace(
            go.Bar(
                name=peer.title,
                x=[list(names) for names in zip(*(_axis(work) for work in works.values()), strict=True)],
                # From 1: a bar of a logarithmic axis has no natural foot.
                y=[None if ratio is None else ratio - 1 for ratio in mine.values()],
                base=1,
                customdata=[
                    [ratio, (rows.get((peer.name, name)) or {}).get("seconds")]
                    for name, ratio in mine.items()
                ],
                # With an edge, so that a ratio of 1 is a line and not taken for no bar.
                marker={
                    "color": LINES[place % len(LINES)],
                    "line": {"color": LINES[place % len(LINES)], "width": 2},
                },
                hovertemplate="%{x}<br><b>%{customdata[0]:.2f}</b> times, %{customdata[1]:.3f} s"
                f"<extra>{peer.title}</extra>",
            )
        )
    machine = found["machine"]
    low, high = min([0.8, *ratios]), max([2.0, *ratios])
    marks = [mark for mark in _TICKS if low / 1.1 <= mark <= high * 1.25]
    return finished(
        drawn,
        title=f"Time / that of {found['ratio_to']} for the same prompts with nothing asked",
        notes=[
            f"{found['model']}, {found['dtype']}, {machine['gpu'] or machine['cpu']}, {found['date']}",
            "below 1 is faster; no bar: cannot, wrong values or not run, the table says which",
        ],
        theme=theme,
        width=_SIZE[0],
        height=_SIZE[1],
        barmode="group",
        bargap=0.25,
        xaxis={"tickangle": 0, "ticks": "", "dividercolor": "rgba(128,128,128,0.4)"},
        yaxis={
            "type": "log",
            "range": [math.log10(low / 1.15), math.log10(high * 1.25)],
            "tickvals": marks,
            "ticktext": [f"{mark:g}" for mark in marks],
            "title": {"text": "times as long"},
        },
        legend={"orientation": "h", "y": -0.16, "yanchor": "top", "x": 0},
        shapes=[
            {
                "type": "line",
                "layer": "below",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": 1,
                "y1": 1,
                "line": {"width": 1.5, "color": "#888"},
            }
        ],
    )


def write(found: dict[str, Any], path: Path) -> None:
    """Write the figure as a page, a picture or plotly's JSON, by the file's ending.

    Raises:
        BenchRefused: The ending is none of these, or there is no browser to draw a picture with.
    """
    check(path)
    drawn = figure(found)
    if path.suffix == ".json":
        path.write_text(drawn.to_json(), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(_page(drawn), encoding="utf-8")
    else:
        _draw(drawn, path)


def check(path: Path) -> None:
    """See that a figure can be written there, before anything is measured.

    Raises:
        BenchRefused: As for `write`.
    """
    if path.suffix not in KINDS:
        raise BenchRefused(f"{path.name}: a figure ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if not path.absolute().parent.is_dir():
        raise BenchRefused(f"{path.parent} is not a folder")
    if path.suffix == ".png" and find_chromium() is None:
        raise BenchRefused(
            "no chromium here to draw a picture with: scripts/setup.sh browser, or write .html"
        )


def _page(drawn: go.Figure, *, buttons: bool = True) -> str:
    config = {"displaylogo": False, "displayModeBar": buttons}
    page: str = drawn.to_html(include_plotlyjs=True, full_html=True, config=config)
    return page.replace("<body>", '<body style="margin:0;background:#fff">')


def _draw(drawn: go.Figure, path: Path) -> None:
    browser = find_chromium()
    with tempfile.TemporaryDirectory(prefix="nnl-figure-") as name:
        page, picture = Path(name) / "figure.html", Path(name) / "figure.png"
        page.write_text(_page(drawn, buttons=False), encoding="utf-8")
        command = [
            str(browser), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size={_SIZE[0]},{_SIZE[1]}", "--virtual-time-budget=10000",
            f"--user-data-dir={name}/profile", f"--screenshot={picture}", page.as_uri(),
        ]  # fmt: skip
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DRAW_S)
        if not picture.is_file():
            raise BenchRefused(f"the browser drew nothing: {answer.stderr.strip()[-200:]}")
        shutil.copyfile(picture, path)


def _axis(work: Work) -> tuple[str, str]:
    """Outer and inner name of a work's place."""
    stream, _, asked = work.title.partition(": ")
    return f"<b>{stream}</b>", _ASKED.get(asked, asked)

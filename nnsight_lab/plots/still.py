"""A figure that is seen where nothing draws plotly: on GitHub, in an HTML export, in another's viewer.

A plotly figure in a notebook is JSON for a script. Where that script is not there the output is empty, so
beside the JSON goes a still of it in plain HTML: the title and notes, and the cells as a small picture, as a
table of words, or the lines as an SVG. JupyterLab and VS Code prefer the JSON. A still is made when the
figure is shown, of what it then holds.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import plotly.io as pio

from nnsight_lab.lens.palette import channels
from nnsight_lab.lens.png import png
from nnsight_lab.plots.blocks import blocks_of

#: Cells of a picture, words of a table, points of a line.
_MAX_PIXELS: Final = 60_000
_MAX_WORDS: Final = 1_500
_MAX_POINTS: Final = 400
_WIDTH_PX, _HEIGHT_PX = 640, 320
_MIME: Final = "plotly_mimetype"
_TAG: Final = re.compile(r"<[^>]*>")


class Figure(go.Figure):  # type: ignore[misc]  # plotly has no types
    """A plotly figure that shows itself with a still."""

    def _ipython_display_(self) -> None:
        names = (pio.renderers.default or "").split("+")
        if _MIME not in names or not pio.renderers.render_on_display:
            super()._ipython_display_()  # a renderer that the user chose
            return
        from IPython.display import display  # only a notebook comes here

        display(self._repr_mimebundle_(), raw=True)  # type: ignore[no-untyped-call,unused-ignore]

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = pio.renderers[_MIME].to_mimebundle(self.to_dict())
        return {**bundle, "text/html": still(self), "text/plain": self._in_words()}

    def _repr_html_(self) -> str:
        return still(self)

    def _in_words(self) -> str:
        return "\n".join(filter(None, map(html.unescape, _head(self)))) or "Figure"


def still(figure: go.Figure) -> str:
    """A figure as HTML without scripts, some tens of kilobytes."""
    title, notes = _head(figure)
    heats = [trace for trace in figure.data if trace.type == "heatmap"]
    texts = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "text"]
    lines = [
        trace
        for trace in figure.data
        if trace.type == "scatter" and "lines" in (trace.mode or "") and trace.xaxis in (None, "x")
    ]
    parts = []
    if heats and texts and len(texts[0].text) <= _MAX_WORDS:
        parts.append(_table(heats[0], texts[0]))
    elif heats:
        parts.append(_picture(heats[0], figure))
    elif lines:
        parts.append(_drawing(lines, figure))
    return (
        f'<div><div style="font-weight:600">{title}</div><div style="font-size:smaller">{notes}</div>'
        f"{''.join(parts)}</div>"
    )


def _head(figure: go.Figure) -> tuple[str, str]:
    """Title and notes as HTML text."""
    title = figure.layout.title
    notes = (title.subtitle.text or "").replace("<br>", " ")
    return _plain(title.text or ""), _plain(notes)


def _plain(text: str) -> str:
    """Plotly's text as HTML text: a user's own tags are left out."""
    return html.escape(html.unescape(_TAG.sub("", text)))


def _z(trace: Any) -> npt.NDArray[np.float64]:
    return np.asarray(trace.z, dtype=np.float64)


def _colours(trace: Any, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Red, green and blue ``[..., 3]`` of values, 0 to 255."""
    low, high = float(trace.zmin), float(trace.zmax)
    place = np.clip((np.nan_to_num(values, nan=low) - low) / (high - low), 0, 1)
    stops = np.array([stop for stop, _ in trace.colorscale])
    tones = np.array([channels(colour) for _, colour in trace.colorscale], dtype=np.float64)
    return np.stack([np.interp(place, stops, tones[:, channel]) for channel in range(3)], axis=-1)


def _upward(figure: go.Figure) -> bool:
    ends = figure.layout.yaxis.range
    return ends is None or float(ends[0]) < float(ends[1])


def _picture(trace: Any, figure: go.Figure) -> str:
    values = _z(trace)
    rows = columns = 1
    while -(-values.shape[0] // rows) * -(-values.shape[1] // columns) > _MAX_PIXELS:
        if values.shape[1] / columns >= values.shape[0] / rows:
            columns *= 2
        else:
            rows *= 2
    if rows * columns > 1:
        values = blocks_of(values, rows, columns)
    pixels = np.full((*values.shape, 4), 255, dtype=np.uint8)
    pixels[..., :3] = np.rint(_colours(trace, values)) // 4 * 4  # fewer colours, so that it packs
    pixels[..., 3] = np.where(np.isfinite(values), 255, 0)
    if _upward(figure):
        pixels = pixels[::-1]
    data = base64.b64encode(png(pixels, level=9)).decode("ascii")
    axes = figure.layout.yaxis.title.text or "", figure.layout.xaxis.title.text or ""
    about = f"{_plain(axes[0])} by {_plain(axes[1])}"
    height = int(min(_HEIGHT_PX, max(24 * values.shape[0], 48)))
    return (
        f'<img alt="{about}" src="data:image/png;base64,{data}" '
        f'style="width:{_WIDTH_PX}px;height:{height}px;max-width:100%;image-rendering:pixelated">'
        f'<div style="font-size:smaller">{about}, from {trace.zmin:.4g} '
        f"{_swatch(trace.colorscale)} to {trace.zmax:.4g}</div>"
    )


def _swatch(colorscale: Any) -> str:
    shown = [colour for _, colour in colorscale][:: max(len(colorscale) // 9, 1)]
    box = '<span style="display:inline-block;width:12px;height:10px;background:{}"></span>'
    return "".join(box.format(colour) for colour in shown)


def _table(heat: Any, words: Any) -> str:
    values = _z(heat)
    tones = np.rint(_colours(heat, values)).astype(int)
    columns = values.shape[1]
    texts = np.asarray(words.text, dtype=object).reshape(values.shape)
    inks = np.asarray(words.textfont.color, dtype=object).reshape(values.shape)
    down = list(heat.y) if heat.y is not None else list(range(values.shape[0]))
    across = list(heat.x) if heat.x is not None else list(range(columns))
    lines = []
    for row in reversed(range(values.shape[0])):
        cells = "".join(
            f'<td style="background:#{red:02x}{green:02x}{blue:02x};color:{ink};padding:1px 4px;'
            f'text-align:center">{_plain(text)}</td>'
            for (red, green, blue), ink, text in zip(tones[row], inks[row], texts[row], strict=True)
        )
        lines.append(f'<tr><th scope="row">{_plain(str(down[row]))}</th>{cells}</tr>')
    names = [_plain(str(name)).split("  id ")[0] for name in across]
    head = "".join(f'<th scope="col" style="text-align:center">{name}</th>' for name in names)
    return (
        '<div style="overflow-x:auto"><table style="font-family:monospace;font-size:12px;border-spacing:1px;'
        f'border-collapse:separate">{"".join(lines)}<tr><td></td>{head}</tr></table></div>'
    )


def _drawing(lines: Iterable[Any], figure: go.Figure) -> str:
    logs = figure.layout.xaxis.type == "log", figure.layout.yaxis.type == "log"
    curves = []
    for trace in lines:
        if trace.fill == "toself":
            continue
        y = np.asarray(trace.y, dtype=np.float64)
        try:
            x = np.arange(len(y), dtype=float) if trace.x is None else np.asarray(trace.x, dtype=np.float64)
        except ValueError:  # settings that are texts
            x = np.arange(len(y), dtype=float)
        every = -(-len(y) // _MAX_POINTS)
        with np.errstate(divide="ignore", invalid="ignore"):
            place = (np.log10(x) if logs[0] else x)[::every], (np.log10(y) if logs[1] else y)[::every]
        curves.append((trace, *place))
    all_x = np.concatenate([x[np.isfinite(x)] for _, x, _ in curves])
    all_y = np.concatenate([y[np.isfinite(y)] for _, _, y in curves])
    if all_x.size == 0 or all_y.size == 0:
        return ""
    scales = [
        (float(values.min()), float(np.ptp(values)) or 1.0, length)
        for values, length in ((all_x, _WIDTH_PX), (all_y, _HEIGHT_PX))
    ]
    parts, names = [], []
    for trace, x, y in curves:
        pen, path = "M", []
        for place, value in zip(x, y, strict=True):
            if not np.isfinite(value):
                pen = "M"
                continue
            right = (place - scales[0][0]) / scales[0][1] * (scales[0][2] - 12) + 6
            down = scales[1][2] - 6 - (value - scales[1][0]) / scales[1][1] * (scales[1][2] - 12)
            path.append(f"{pen}{right:.1f} {down:.1f}")
            pen = "L"
        colour = html.escape(str(trace.line.color or "#888"))
        parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.75"/>')
        names.append(f'<span style="color:{colour}">■</span> {_plain(trace.name)}' if trace.name else "")
    ends = [10**end if log else end for log, values in zip(logs, (all_x, all_y), strict=True)
            for end in (float(values.min()), float(values.max()))]  # fmt: skip
    axes = _plain(figure.layout.yaxis.title.text or ""), _plain(figure.layout.xaxis.title.text or "")
    said = f"{axes[0]} {ends[2]:.4g} to {ends[3]:.4g} over {axes[1]} {ends[0]:.4g} to {ends[1]:.4g}"
    return (
        f'<svg viewBox="0 0 {_WIDTH_PX} {_HEIGHT_PX}" role="img" aria-label="{axes[0]} over {axes[1]}" '
        f'style="width:{_WIDTH_PX}px;max-width:100%;border-left:1px solid #888;border-bottom:1px solid #888">'
        f'{"".join(parts)}</svg><div style="font-size:smaller">{said} {" ".join(names)}</div>'
    )

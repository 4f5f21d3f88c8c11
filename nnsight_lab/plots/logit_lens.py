"""What each layer would say next: a logit lens as a table of tokens, coloured by how sure it is.

Text cannot be averaged, so what does not fit is not put together as a heatmap's values are: the last
positions are shown, the figure says which, and ``positions=`` chooses others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import text_on
from nnsight_lab.lens.tokens import shortened, visible
from nnsight_lab.plots.axes import Axis, escaped
from nnsight_lab.plots.colours import Colouring, colouring
from nnsight_lab.plots.figure import finished, gaps_note
from nnsight_lab.plots.heatmap import heat, log_bar
from nnsight_lab.plots.still import Figure
from nnsight_lab.plots.theme import MONOSPACE
from nnsight_lab.plots.values import matrix_of

#: Cells of one figure, each with its list of tokens in the hover.
MAX_CELLS: Final = 6_000
#: How many tokens a hover lists, and how long: the first of these that keeps the figure small.
_LISTED: Final = ((5, 24), (3, 12), (1, 8), (0, 0))
_MAX_HOVER_BYTES: Final = 1_500_000
#: Positions up to which a text is written in each cell, and up to which they fit a page.
_MAX_WRITTEN, _FITTING = 48, 16
_COLUMN_PX, _BESIDE_PX, _PAGE_PX, _CHARACTER_PX = 46, 160, 900, 6.7
_COLOURS: Final = ("probability", "entropy", "rank")
_ROW_PX: Final = 22

T = TypeVar("T")


class LensResult(Protocol):
    """What a logit lens found.

    Attributes:
        layers: The layers that were read.
        positions: The places in the prompt that were.
        tokens: The text of each of the prompt's tokens; empty where only a stream was read.
        token_ids: Their ids.
        top_ids: ``[layer, position, k]``, integers, the most probable first.
        top_probabilities: ``[layer, position, k]``.
        top_tokens: The tokens' texts, nested alike.
        entropy: ``[layer, position]``, in nats.
        final_ranks: ``[layer, position]``, integers: how many tokens each layer finds likelier than the one
            that the last layer says; None where the last layer is not known.
    """

    @property
    def layers(self) -> Sequence[int]: ...
    @property
    def positions(self) -> Sequence[int]: ...
    @property
    def tokens(self) -> Sequence[str]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def top_ids(self) -> Any: ...
    @property
    def top_probabilities(self) -> Any: ...
    @property
    def top_tokens(self) -> Sequence[Sequence[Sequence[str]]]: ...
    @property
    def entropy(self) -> Any: ...
    @property
    def final_ranks(self) -> Any: ...


def logit_lens(
    result: LensResult,
    *,
    colour: str = "probability",
    positions: slice | Sequence[int] | None = None,
    title: str = "Logit lens",
    theme: str = "auto",
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """A logit lens: layers upward, positions across, in each cell the layer's most probable next token.

    Args:
        result: What a logit lens found: `LensResult` says what is read of it.
        colour: ``"probability"`` of that token, ``"entropy"`` of the layer's distribution, or ``"rank"`` that
            the layer gives to what the last one says.
        positions: Those to show: a slice, or a list. All, where they fit; else the last ones.
        title: Above the figure.
        theme: ``"auto"``, ``"light"`` or ``"dark"``.
        width: In pixels.
        height: In pixels.

    Raises:
        PlotRefused: The result's parts do not fit each other, or there is nothing in it.
    """
    __tracebackhide__ = True
    if colour not in _COLOURS:
        raise PlotRefused(f"colour={colour!r} is not known: write one of {', '.join(map(repr, _COLOURS))}.")
    if isinstance(result, list | tuple):
        raise PlotRefused(
            f"this is a list of {len(result):,} lenses; a figure shows one: lab.plot.logit_lens(lenses[0])."
        )
    if not hasattr(result, "top_probabilities"):
        raise PlotRefused(f"this is {type(result).__name__}, and a logit lens is what lab.logit_lens gives.")
    read = _Read(result)
    chosen, note = _chosen(positions, len(read.layers), len(read.places))
    across = Axis(
        "position",
        len(chosen),
        [read.places[position] for position in chosen],
        None if read.tokens is None else [read.tokens[position] for position in chosen],
        None if read.token_ids is None else [read.token_ids[position] for position in chosen],
    )
    down = Axis("layer", len(read.layers), read.layers)
    values = {
        "probability": lambda: read.probabilities[:, :, 0],
        "entropy": lambda: read.part("entropy"),
        "rank": lambda: read.ranks(),
    }[colour]()[:, chosen]
    unit = {
        "probability": "probability",
        "entropy": "entropy (nats)",
        "rank": "rank of the last layer's token",
    }
    colours, shown = _colouring(values, colour)
    written = len(chosen) <= _MAX_WRITTEN
    if written and width is None and len(chosen) > _FITTING:
        width = _BESIDE_PX + _COLUMN_PX * len(chosen)  # wider than the page, which then scrolls
    column_px = ((width or _PAGE_PX) - _BESIDE_PX) / len(chosen)
    trace = heat(
        shown,
        down,
        across,
        colours,
        unit[colour].partition(" of ")[0],
        hovertemplate="layer %{y}<br>position %{x}<br>%{hovertext}<extra></extra>",
        hovertext=read.hovers(chosen),
        xgap=1 if written else 0,
        ygap=1 if written else 0,
    )
    figure = Figure(layout={"template": None})
    figure.add_trace(trace)
    if written:
        figure.add_trace(_texts(read, chosen, shown, colours, down, across, column_px))
    if colours.scale == "log":
        figure.add_trace(log_bar(colours, "rank"))
        figure.update_layout(legend={"visible": False})
    notes = [
        f"each cell: the most probable next token, coloured by {unit[colour]}",
        note,
        "" if written else "too many positions for text in the cells: point at one, or choose positions",
        gaps_note(int(np.isnan(values).sum()), int(np.isinf(values).sum())),
    ]
    return finished(
        figure,
        title=title,
        notes=notes,
        theme=theme,
        width=width,
        height=height or min(max(180 + _ROW_PX * len(read.layers), 260), 1100),
        xaxis=across.layout("x"),
        yaxis=down.layout("y"),
    )


class _Read:
    """A result, checked: its parts fit each other."""

    def __init__(self, result: LensResult) -> None:
        if not hasattr(result, "top_probabilities"):
            several = isinstance(result, (list, tuple)) and any(
                hasattr(each, "top_probabilities") for each in result
            )
            instead = "draw one of them" if several else "give what lab.logit_lens found"
            raise PlotRefused(f"a {type(result).__name__} is no lens: {instead}")
        self._result = result
        self.layers = [int(layer) for layer in result.layers]
        self.places = [int(place) for place in result.positions]
        self.tokens = self._at_places(result.tokens, str)
        self.token_ids = self._at_places(result.token_ids, int)
        if not self.layers or not self.places:
            raise PlotRefused("there is nothing to draw: the lens has no layers or no positions")
        self.probabilities = self._three("top_probabilities")
        self._ids = self._three("top_ids").astype(np.int64)
        self._texts = result.top_tokens
        self._entropy = self.part("entropy")
        self._ranks = None if result.final_ranks is None else self.part("final_ranks")

    def _at_places(self, of_prompt: Sequence[Any], kind: Callable[[Any], T]) -> list[T] | None:
        """What is known of each place that was read; None where there is no prompt."""
        if len(of_prompt) == 0:
            return None
        if max(self.places, default=0) >= len(of_prompt):
            raise PlotRefused(
                f"the lens has position {max(self.places)}, and a prompt of {len(of_prompt)} tokens"
            )
        return [kind(of_prompt[place]) for place in self.places]

    def ranks(self) -> npt.NDArray[np.float64]:
        """How many tokens each layer finds likelier than the last layer's, ``[layer, position]``."""
        if self._ranks is None:
            raise PlotRefused("the lens has no ranks: the last layer was not read with it")
        return np.where(self._ranks < 0, np.nan, self._ranks)  # no rank: the logits were no numbers

    def part(self, name: str) -> npt.NDArray[np.float64]:
        """A part ``[layer, position]``, float64."""
        found = matrix_of(getattr(self._result, name))
        return self._fitting(name, found.read().reshape(found.shape), 2)

    def _three(self, name: str) -> npt.NDArray[np.float64]:
        given = getattr(self._result, name)
        shape = tuple(np.shape(given))
        if len(shape) != 3 or 0 in shape:
            raise PlotRefused(f"the lens's {name} has shape {list(shape)}, not [layer, position, k]")
        flat = given.reshape(-1, shape[2]) if hasattr(given, "reshape") else np.reshape(given, (-1, shape[2]))
        return self._fitting(name, matrix_of(flat).read().reshape(shape), 3)

    def _fitting(self, name: str, values: npt.NDArray[np.float64], dims: int) -> npt.NDArray[np.float64]:
        expected = (len(self.layers), len(self.places))
        if values.ndim != dims or values.shape[:2] != expected:
            raise PlotRefused(
                f"the lens's {name} has shape {list(values.shape)} for {expected[0]} layers and "
                f"{expected[1]} positions"
            )
        return values

    def text(self, layer: int, position: int, k: int) -> str:
        return visible(str(self._texts[layer][position][k]))

    def hovers(self, positions: Sequence[int]) -> list[list[str]]:
        """What each cell's hover says."""
        found: list[list[str]] = []
        for listed, limit in _LISTED:
            found = [
                [self._hover(layer, position, listed, limit) for position in positions]
                for layer in range(len(self.layers))
            ]
            text = json.dumps(found)
            # Plotly writes these as \u003c.
            if len(text) + 5 * sum(map(text.count, "<>/")) <= _MAX_HOVER_BYTES:
                break
        return found

    def _hover(self, layer: int, position: int, listed: int, limit: int) -> str:
        """The most probable tokens, each on a line, then entropy and rank."""
        found = []
        for k in range(min(listed, self.probabilities.shape[2])):
            probability = f"{self.probabilities[layer, position, k]:.4f}"
            text = escaped(shortened(self.text(layer, position, k), limit))
            line = f"{probability}  {text}  id {self._ids[layer, position, k]}"
            found.append(f"<b>{line}</b>" if k == 0 else line)
        found.append(f"entropy {self._entropy[layer, position]:.4g}")
        if self._ranks is not None:
            found.append(f"rank of the last layer's token {self._ranks[layer, position]:,.0f}")
        return "<br>".join(found)


def _texts(
    read: _Read,
    chosen: Sequence[int],
    shown: npt.NDArray[np.float64],
    colours: Colouring,
    down: Axis,
    across: Axis,
    column_px: float,
) -> go.Scatter:
    """The texts in the cells: a trace of their own, so that each has the colour that is read on its cell."""
    limit = max(int((column_px - 6) / _CHARACTER_PX), 2)
    places = [(layer, column) for layer in range(len(read.layers)) for column in range(len(chosen))]
    rows, columns = down.at(range(len(read.layers))), across.at(range(len(chosen)))
    return go.Scatter(
        x=[columns[column] for _, column in places],
        y=[rows[layer] for layer, _ in places],
        text=[escaped(shortened(read.text(layer, chosen[column], 0), limit)) for layer, column in places],
        mode="text",
        textfont={
            "family": MONOSPACE,
            "size": 11,
            "color": [text_on(colours.of(float(shown[place]))) for place in places],
        },
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=True,
    )


def _chosen(positions: slice | Sequence[int] | None, layers: int, count: int) -> tuple[list[int], str]:
    most = max(MAX_CELLS // layers, 1)
    if positions is None:
        chosen = list(range(max(count - most, 0), count))
    elif isinstance(positions, slice):
        chosen = list(range(count))[positions]
    else:
        outside = [position for position in positions if not -count <= position < count]
        if outside:
            raise PlotRefused(f"there is no position {outside[0]}: the lens has {count:,}")
        chosen = [int(position) % count for position in positions]
    if not chosen:
        raise PlotRefused(f"positions={positions!r} chooses none of the {count:,} there are")
    if len(chosen) > most:
        raise PlotRefused(
            f"{len(chosen):,} positions of {layers} layers are too many: choose at most {most:,}"
        )
    if len(chosen) == count:
        return chosen, ""
    if chosen == list(range(chosen[0], chosen[-1] + 1)):
        return chosen, f"positions {chosen[0]:,} to {chosen[-1]:,} of {count:,} are shown"
    return chosen, f"{len(chosen):,} of {count:,} positions are shown"


def _colouring(values: npt.NDArray[np.float64], colour: str) -> tuple[Colouring, npt.NDArray[np.float64]]:
    """Colours in which what is sure of itself is bright, and the values that they are of."""
    if colour == "probability":
        return colouring(values, "sequential", span=(0.0, 1.0)), values
    finite = values[np.isfinite(values)]
    if colour == "entropy":
        most = float(finite.max()) if finite.size else 1.0
        found = colouring(values, "sequential", span=(0.0, most if most > 0 else 1.0))
    else:
        # Ranks may count from zero, where a logarithm is not.
        values = values + 1 if finite.size and finite.min() < 1 else values
        most = float(np.nanmax(np.where(np.isfinite(values), values, 1.0)))
        found = colouring(values, "log", span=(1.0, max(most, 10.0)))
    turned = [tone for _, tone in found.colours][::-1]
    places = [place for place, _ in found.colours]
    return found._replace(colours=tuple(zip(places, turned, strict=True))), values

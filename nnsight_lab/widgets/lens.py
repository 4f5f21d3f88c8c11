"""A logit lens to walk in: layers upward, positions across, in each cell what the layer would say next.

A lens of a hundred layers and a thousand positions is a hundred thousand cells with ten tokens each. A page
gets the cells in sight as arrays of numbers and the text of each token once, and the whole list of one cell
when somebody points at it. Every text is made visible here, so that a page never sees a raw one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import torch
import traitlets

from nnsight_lab.errors import CellUsageError, SavesError
from nnsight_lab.lens.logit_lens import LogitLens
from nnsight_lab.lens.shown import Several
from nnsight_lab.lens.tokens import shortened, visible
from nnsight_lab.widgets import colours, kinds
from nnsight_lab.widgets.base import Answer, LabWidget, Question, answers
from nnsight_lab.widgets.prompts import Prompts, listed
from nnsight_lab.widgets.sequences import sequence_key

#: What one question may ask for.
MAX_CELLS: Final = 16_384
#: A cell is never as wide as that; the whole text is in the pane, up to a bound of its own.
_CELL_CHARACTERS: Final = 28
_PANE_CHARACTERS: Final = 2_000
_PANE_TOKENS: Final = 50


class Measure(NamedTuple):
    """A number of each cell.

    Attributes:
        name: What it is called on the wire.
        label: What a reader calls it.
        values: ``[layer, position]``.
        kind: ``"share"`` (0 to 1), ``"nats"`` or ``"rank"`` (0 is the top, -1 is none).
    """

    name: str
    label: str
    values: torch.Tensor
    kind: str


class LensView(LabWidget):
    """A logit lens: zoom, point at a cell for its likeliest tokens, choose a position for every view.

    A notebook shows it for `LogitLens` itself, and for the list of several prompts.

    Args:
        lens: A `LogitLens`, or a list of them.
        colour: What colours a cell: ``"probability"``, ``"entropy"``, ``"final_rank"``,
            ``"final_probability"``, ``"target_rank"`` or ``"target_probability"``, as far as it has them.
        height: Of the grid at the most, in pixels.

    Raises:
        CellUsageError: It is no logit lens, or does not have that number.
    """

    module: ClassVar[str] = "lens"

    prompts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    count = traitlets.Int().tag(sync=True)
    colour = traitlets.Unicode("probability").tag(sync=True)
    height = traitlets.Int(520).tag(sync=True)
    palettes = traitlets.Dict().tag(sync=True)

    def __init__(
        self, lens: LogitLens | Sequence[LogitLens], *, colour: str = "probability", height: int = 520
    ) -> None:
        self._lenses: Prompts[LogitLens] = Prompts(lens, LogitLens)
        known = [one.name for one in measures(self._lenses[0])]
        if colour not in known:
            raise CellUsageError(f"colour={colour!r} is not one of {', '.join(map(repr, known))}")
        several = [self._lenses[index] for index in range(self._lenses.count)]
        self._words = repr(several[0])[1:-1]
        super().__init__(
            prompts=listed([one.tokens for one in several]),
            count=len(several),
            colour=colour,
            height=int(height),
            palettes={"sequential": colours.PALETTES["sequential"], **colours.SPECIAL},
        )

    # -- what the browser asks -----------------------------------------------------------------

    @answers(kinds.PROMPT)
    def _give_prompt(self, question: Question) -> Answer:
        """What a page must know of a prompt before it draws."""
        lens = self._lenses[int(question["prompt"])]
        whole = lens.positions == tuple(range(len(lens.positions)))
        return Answer(
            {
                "layers": list(lens.layers),
                "positions": len(lens.positions),
                "places": None if whole else list(lens.positions),
                "sequence": sequence_key(lens.token_ids, lens.tokens),
                "measures": [
                    {"name": one.name, "label": one.label, "kind": one.kind, "most": _most(one)}
                    for one in measures(lens)
                ],
            }
        )

    @answers(kinds.CELLS)
    def _give_cells(self, question: Question) -> Answer:
        """Cells of some rows and columns: ids, then each measure, as arrays ``[row, column]``."""
        lens = self._lenses[int(question["prompt"])]
        rows, columns = (_window(question, axis, size) for axis, size in _sizes(lens))
        if len(rows) * len(columns) > MAX_CELLS:
            raise CellUsageError(f"{len(rows) * len(columns):,} cells at once are too many for a page")
        window = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
        ids = lens.top_ids[..., 0][window].to(torch.int32).contiguous()
        buffers = [ids.numpy().tobytes()]
        buffers += [
            one.values[window].to(torch.float32).contiguous().numpy().tobytes() for one in measures(lens)
        ]
        places = lens.positions[window[1]]
        return Answer(
            {
                "texts": {str(token): _short(lens.texts[token]) for token in set(ids.flatten().tolist())},
                "places": list(places),
                "heads": [_short(lens.tokens[place]) if lens.tokens else "" for place in places],
            },
            tuple(buffers),
        )

    @answers(kinds.CELL)
    def _give_cell(self, question: Question) -> Answer:
        """All that is known of one cell."""
        lens = self._lenses[int(question["prompt"])]
        (_, layers), (_, positions) = _sizes(lens)
        row, column = int(question["row"]), int(question["column"])
        if not (0 <= row < layers and 0 <= column < positions):
            raise CellUsageError(f"row {row:,}, column {column:,} lies outside the lens")
        ids = lens.top_ids[row, column, :_PANE_TOKENS].tolist()
        shares = lens.top_probabilities[row, column, :_PANE_TOKENS].tolist()
        place = lens.positions[column]
        told = []
        if lens.final_ids is not None:
            told.append(("the model says", int(lens.final_ids[column]), "final"))
        if lens.target_id is not None:
            told.append(("target", lens.target_id, "target"))
        found = {one.name: one.values for one in measures(lens)}
        return Answer(
            {
                "layer": lens.layers[row],
                "position": place,
                "token": _whole(lens.tokens[place]) if lens.tokens else "",
                "token_id": lens.token_ids[place] if lens.token_ids else None,
                "top": [
                    [_whole(lens.texts[token]), token, _number(share)]
                    for token, share in zip(ids, shares, strict=True)
                ],
                "entropy": _number(lens.entropy[row, column]),
                "told": [
                    {
                        "label": label,
                        "text": _whole(lens.texts[token]),
                        "id": token,
                        "rank": int(found[f"{name}_rank"][row, column]),
                        "probability": _number(found[f"{name}_probability"][row, column]),
                    }
                    for label, token, name in told
                ],
            }
        )

    # -- where no widget runs ------------------------------------------------------------------

    def plain(self) -> str:
        """As in ``"LogitLens 30 layers x 12 positions, top 10"``."""
        more = f" (and of {self._lenses.count - 1:,} more prompts)" if self._lenses.count > 1 else ""
        return f"{self._words}{more}"

    def fallback(self) -> str:
        """The first lenses as tables."""
        try:
            return Several(self._lenses.first(Several.MOST_IN_HTML), of=self._lenses.count)._repr_html_()
        except SavesError:  # it is gone, and its words are left
            return super().fallback()

    # -- its life ------------------------------------------------------------------------------

    def looked_at(self) -> None:
        """The lens stays while it is looked at."""
        self._lenses.hold()

    def out_of_sight(self) -> None:
        """And no longer than others hold it."""
        self._lenses.loosen()

    def released(self) -> None:
        """Let go of it."""
        self._lenses.loosen()


def measures(lens: LogitLens) -> list[Measure]:
    """The numbers that a lens has of each cell."""
    found = [
        Measure("probability", "probability", lens.top_probabilities[..., 0], "share"),
        Measure("entropy", "entropy (nats)", lens.entropy, "nats"),
    ]
    if lens.final_ranks is not None and lens.final_probabilities is not None:
        found += [
            Measure("final_rank", "rank of what the model says", lens.final_ranks, "rank"),
            Measure("final_probability", "probability of it", lens.final_probabilities, "share"),
        ]
    if lens.target_ranks is not None and lens.target_probabilities is not None:
        found += [
            Measure("target_rank", "rank of the target", lens.target_ranks, "rank"),
            Measure("target_probability", "probability of the target", lens.target_probabilities, "share"),
        ]
    return found


def _most(measure: Measure) -> float:
    """Where the colours of a measure end."""
    if measure.kind == "share":
        return 1.0
    values = measure.values.to(torch.float64)
    finite = values[values.isfinite()]
    most = float(finite.max()) if len(finite) else 0.0
    return most if most > 0 else 1.0


def _sizes(lens: LogitLens) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("rows", len(lens.layers)), ("columns", len(lens.positions))


def _window(question: Question, axis: str, size: int) -> range:
    first, last = (int(end) for end in question[axis])
    if not 0 <= first < last or first >= size:
        raise CellUsageError(f"{axis} {first:,} to {last:,} lie outside the lens")
    return range(first, min(last, size))


def _short(text: str) -> str:
    return shortened(visible(text), _CELL_CHARACTERS)


def _whole(text: str) -> str:
    return shortened(visible(text), _PANE_CHARACTERS)


def _number(value: torch.Tensor | float) -> float | None:
    """For JSON, which has no NaN."""
    number = float(value)
    return number if np.isfinite(number) else None

"""A tensor of any size as a picture one can walk in.

The kernel keeps the tensor and answers with tiles of one byte per block; the exact numbers are asked for
where the pointer is. What one block stands for is said in words under the picture, since a picture of
means looks as sharp as one of values.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
import traitlets

from nnsight_lab.errors import CellUsageError, nearest
from nnsight_lab.lens.tokens import visible
from nnsight_lab.saves.label import SaveKey, SaveLabel
from nnsight_lab.widgets import colours, kinds, spans
from nnsight_lab.widgets.base import Answer, Question, answers, long
from nnsight_lab.widgets.positions import Positioned
from nnsight_lab.widgets.reduce import HOWS, How, numbers, reduce_blocks
from nnsight_lab.widgets.sequences import sequence_key
from nnsight_lab.widgets.sources import SavedSource, Source, source_of
from nnsight_lab.widgets.tiles import CACHE_BYTES, TILE, Leads, Level, Place, Tiles
from nnsight_lab.widgets.words import counted, exact, index_text, shape_words, short
from nnsight_lab.wire.sizes import shown_bytes

#: What one message of tiles may hold.
_MESSAGE_BYTES: Final = 2**20
#: A picture where no widget runs: how large, and of how much it is exact rather than a sample.
_PICTURE: Final = (160, 320)
_POSTER: Final = (64, 128)
_EXACT_VALUES: Final = 4 * 2**20
#: While it grows.
_GROWING: Final = (512, 512)
_TABLE: Final = (8, 12)
_NEAR: Final = (3, 2)
_MAX_LABELS: Final = 400
_MAX_BINS: Final = 4096


class Heatmap(Positioned):
    """A picture of a tensor, array or saved value; zoom, pan, and see the exact numbers.

    The last two dimensions are rows and columns; sliders walk the others. One of 1-D is drawn as a line.
    While it is on a page it holds the tensor; when its last view was closed, only what else holds it does.

    Args:
        values: A tensor of any shape, dtype and device, an array, numbers in lists; or a `SavesStore`, with
            ``label``.
        label: Which of the store's saves.
        name: What it is called in expressions to copy.
        axes: The dimensions' names, one each, or of the last ones.
        rows: Labels of the rows, such as tokens.
        columns: Labels of the columns.
        tokens: The texts of the tokens that the rows or columns stand for, in their order. They label
            that axis, and its position is chosen together with that of every view of these tokens: a click
            on a cell chooses, and the chosen one is marked. A saved value whose axis is as long as its
            request's prompt needs none of this.
        token_ids: Their ids, which tell one sequence from another better than texts do; may stand alone.
        token_axis: ``"rows"``, ``"columns"``, ``"both"``; ``"auto"`` takes those of that length.
        how: What one block shows from afar: ``"mean"``, ``"max"``, ``"min"`` or ``"absmax"``.
        scale: ``"auto"``, ``"sequential"``, ``"diverging"`` (around zero) or ``"log"`` (of magnitudes).
        clip: What the colours span: ``"robust"`` (the middle 98 % of what is drawn), ``"full"``, or two
            numbers.
        height: Of the picture, in pixels.
        cache_bytes: What the kernel may keep of what it computed.

    Attributes:
        picked: The index of what was last shown in detail, as in ``tensor[heatmap.picked]``; None before.
        position: The chosen place in the tokens' sequence, here or in any view of it; setting it chooses.

    Raises:
        SavesError: It cannot be drawn.
        SaveNotFound: The store does not have it.
        CellUsageError: An argument is not one of these.
    """

    module: ClassVar[str] = "heatmap"

    name = traitlets.Unicode().tag(sync=True)
    shape = traitlets.List(traitlets.Int()).tag(sync=True)
    dtype = traitlets.Unicode().tag(sync=True)
    size = traitlets.Unicode().tag(sync=True)
    axes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    labelled = traitlets.List(traitlets.Bool()).tag(sync=True)
    settings = traitlets.Dict().tag(sync=True)
    height = traitlets.Int(420).tag(sync=True)
    poster = traitlets.Unicode().tag(sync=True)
    described = traitlets.Unicode().tag(sync=True)
    palettes = traitlets.Dict().tag(sync=True)
    #: Of rows and columns, the position that the first one is; None where they are no positions.
    places = traitlets.List(traitlets.Int(allow_none=True)).tag(sync=True)

    def __init__(
        self,
        values: Any,
        label: SaveLabel | SaveKey | None = None,
        *,
        name: str | None = None,
        axes: Sequence[str] | None = None,
        rows: Sequence[Any] | None = None,
        columns: Sequence[Any] | None = None,
        tokens: Sequence[str] | None = None,
        token_ids: Sequence[int] | None = None,
        token_axis: str = "auto",
        how: str = "mean",
        scale: str = "auto",
        clip: str | tuple[float, float] = "robust",
        height: int = 420,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        source = source_of(values, label)
        _one_of("how", how, HOWS)
        _one_of("scale", scale, spans.SCALES)
        clip = _clip_of(clip, scale)
        self._tiles = Tiles(source, cache_bytes)
        if tokens is None and token_ids is None:
            self._ids, on = _ids_of(source), []
            if self._ids:
                on = _axes_of_length(source.shape, len(self._ids))
        else:
            on = _token_axes(source.shape, tokens, token_ids, token_axis)
            self._ids = tuple(map(int, token_ids or ()))
            texts = None if tokens is None else [visible(str(text)) for text in tokens]
            rows = texts if rows is None and 0 in on else rows
            columns = texts if columns is None and 1 in on else columns
        self._known = range(len(tokens if tokens is not None else self._ids) if on else 0)
        self._labels = [
            _labels_of(rows, self._tiles.rows, "rows"),
            _labels_of(columns, self._tiles.columns, "columns"),
        ]
        self._source_shape = source.shape
        self._running: bool | None = None
        self.picked: tuple[int | slice, ...] | None = None
        super().__init__(
            name=name or (f"{label.name}{label.path}" if label is not None else "tensor"),
            shape=list(source.shape),
            dtype=source.dtype,
            size=shown_bytes(source.nbytes),
            axes=_axes_of(axes, len(source.shape)),
            labelled=[bool(found) for found in self._labels],
            settings={"how": how, "scale": scale, "clip": clip if isinstance(clip, str) else list(clip)},
            height=int(height),
            palettes={**colours.PALETTES, **colours.SPECIAL},
            places=[0 if axis in on else None for axis in (0, 1)],
            sequence=sequence_key(self._ids, tokens or ()) if on else "",
        )
        self.described = self._described()

    @classmethod
    def growing(
        cls, values: torch.Tensor, *, name: str, tokens: Sequence[str], height: int = 420, **more: Any
    ) -> Heatmap:
        """A heatmap whose rows, or values of one dimension, are positions, and may become more by `grow`.

        Args:
            values: ``[position]``, or ``[position, …]``.
            name: As for the class.
            tokens: As for `grow`.
            height: As for the class.
            **more: As for `grow`.
        """
        made = cls(values, name=name, axes=["position"] if values.dim() == 1 else None, height=height)
        made.grow(values, tokens=tokens, **more)
        return made

    def grow(
        self,
        values: torch.Tensor,
        *,
        tokens: Sequence[str],
        token_ids: Sequence[int],
        first: int,
        running: bool,
    ) -> None:
        """Show more rows of the same: one message to the pages, with a picture of all of it.

        While it runs the pages get pictures and ask for no tiles: a kernel that is busy could not answer.

        Args:
            values: All of it.
            tokens: The texts of the sequence's tokens.
            token_ids: Of its prompt.
            first: The position of the first row.
            running: Whether more may come.
        """
        if running == self._running and tuple(values.shape) == self._source_shape:
            return
        axis = 1 if values.dim() == 1 else 0
        source = source_of(values)
        self._tiles, self._source_shape, self._running = Tiles(source, CACHE_BYTES), source.shape, running
        self._known = range(first, first + len(values))
        texts = [visible(str(text)) for text in tokens[first : first + len(values)]]
        self._labels = [None, None]
        self._labels[axis] = [*texts, *[""] * (len(values) - len(texts))]
        now = {
            "shape": list(source.shape),
            "size": shown_bytes(source.nbytes),
            "labelled": [axis == 0, axis == 1],
            "places": [first if axis == 0 else None, first if axis == 1 else None],
            "sequence": sequence_key(token_ids),
            "described": self._described(),
        }
        with self.untold():
            for trait, value in now.items():
                self.set_trait(trait, value)
        content, buffers = self._seen_now(axis == 1)
        self.send({kinds.KIND: kinds.GREW, "running": running, "traits": now, **content}, buffers)
        if not running:
            self.send_state(list(now))

    def _seen_now(self, line: bool) -> tuple[dict[str, Any], list[bytes]]:
        """All of it, small enough for a message: the numbers of a line, or the codes of a picture."""
        rows, columns = self._tiles.rows, self._tiles.columns
        if line:
            level = _halvings(columns, _MAX_BINS)
            parts = [reduce_blocks(self._numbers(()), 1, 2**level, how) for how in ("min", "max", "mean")]
            ends = self._tiles.span((), "mean", Level(0, 0), "sequential", "full")
            buffers = [part.values[0].to(torch.float64).numpy().tobytes() for part in parts]
            buffers.append(parts[0].flags[0].numpy().tobytes())
            last = -(-columns // 2**level)
            return {"line": [0, last], "level": level, "ends": [ends.low, ends.high]}, buffers
        level_ = Level(_halvings(rows, _GROWING[0]), _halvings(columns, _GROWING[1]))
        how, scale, clip = self.settings["how"], self.settings["scale"], self.settings["clip"]
        clip = clip if isinstance(clip, str) else (clip[0], clip[1])
        blocks = reduce_blocks(self._numbers(()), 2**level_.rows, 2**level_.columns, how)
        span = self._tiles.span((), how, level_, scale, clip)
        codes = self._tiles.codes(blocks, span)
        return {"picture": list(codes.shape), "span": list(span), "level": list(level_)}, [codes.tobytes()]

    def positions(self) -> range:
        """The positions that its rows or columns are."""
        return self._known

    @property
    def source(self) -> Source | None:
        """What it reads from; None when it was closed."""
        return self._tiles.source

    # -- what the browser asks -----------------------------------------------------------------

    @answers(kinds.TILES)
    @long
    def _give_tiles(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        leads, level, how = self._leads(question), Level(*question["level"]), _how(question)
        places = [Place(level, int(row), int(column)) for row, column in question["tiles"]]
        scale, clip = question["scale"], _clip_of(question["clip"], question["scale"])
        if not self._tiles.is_quick(leads, how, places) and question.get("preview"):
            span = self._tiles.span(leads, how, Level(0, 0), scale, clip if clip != "full" else "robust")
            codes = self._tiles.preview(leads, span)
            yield Answer({"preview": list(codes.shape), "span": list(span)}, (codes.tobytes(),))
        if stopped():
            return
        span = self._tiles.span(leads, how, level, scale, clip)
        batch: list[list[int]] = []
        buffers: list[bytes] = []
        for number, place in enumerate(places):
            quick = self._tiles.is_quick(leads, how, [place])
            codes = self._tiles.codes(self._tiles.tile(leads, how, place, stopped), span)
            batch.append([place.row, place.column, *codes.shape])
            buffers.append(codes.tobytes())
            # What took long is shown at once; what did not goes together.
            if not quick or sum(map(len, buffers)) > _MESSAGE_BYTES or number == len(places) - 1:
                special = self._tiles.special(leads)
                yield Answer({"tiles": batch, "span": list(span), "special": list(special)}, tuple(buffers))
                batch, buffers = [], []
        if question.get("count"):
            yield Answer({"special": list(self._tiles.count(leads, how, stopped))})

    @answers(kinds.LINE)
    @long
    def _give_line(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        level = Level(0, int(question["level"]))
        first, last = (
            int(question["first"]),
            min(int(question["last"]), -(-self._tiles.columns // 2**level.columns)),
        )
        last = min(last, first + _MAX_BINS)
        buffers = []
        flags = None
        hows: tuple[How, ...] = ("min", "max", "mean")
        for how in hows:
            parts = [
                self._tiles.tile((), how, Place(level, 0, column), stopped)
                for column in range(first // TILE, -(-last // TILE))
            ]
            window = slice(first - first // TILE * TILE, last - first // TILE * TILE)
            values = torch.cat([part.values[0] for part in parts])[window]
            flags = torch.cat([part.flags[0] for part in parts])[window]
            buffers.append(values.to(torch.float64).numpy().tobytes())
        assert flags is not None
        buffers.append(flags.numpy().tobytes())
        ends = self._tiles.span((), "mean", Level(0, 0), "sequential", "full")
        special = list(self._tiles.special(()))
        yield Answer(
            {"line": [first, last], "ends": [ends.low, ends.high], "special": special}, tuple(buffers)
        )

    @answers(kinds.VALUE)
    def _give_value(self, question: Question) -> Answer:
        leads, level, row, column = self._at(question)
        where = self._where(level, row, column)
        if level == (0, 0):
            value = self._tiles.values(leads, slice(row, row + 1), slice(column, column + 1))[0, 0]
            return Answer({"where": where, "text": exact(value)})
        found = self._tiles.block(leads, level, row, column)
        if found is None:
            return Answer({"where": where, "text": "too many values to read at once: zoom in"})
        some = counted(found.nan, found.posinf, found.neginf)
        text = "no finite value"
        if found.least <= found.most:
            mean = short(float(found.values[0, 0]))
            text = f"mean {mean}, from {short(found.least)} to {short(found.most)}"
        return Answer({"where": where, "text": f"{text}{', ' + some if some else ''}"})

    @answers(kinds.DETAIL)
    def _give_detail(self, question: Question) -> Answer:
        leads, level, row, column = self._at(question)
        rows, columns = self._ranges(level, row, column)
        down, across = _NEAR
        near_rows = range(max(0, rows.start - down), min(self._tiles.rows, rows.start + down + 1))
        near_columns = range(
            max(0, columns.start - across), min(self._tiles.columns, columns.start + across + 1)
        )
        near = self._tiles.values(leads, _slice(near_rows), _slice(near_columns))
        one = level == (0, 0)
        index = self._index(
            leads, rows.start if one else _slice(rows), columns.start if one else _slice(columns)
        )
        self.picked = index
        answer = self._give_value(question)
        return Answer(
            {
                **answer.content,
                "expression": f"{self.name}{index_text(index)}",
                "rows": [self._label(0, at) for at in near_rows],
                "columns": [self._label(1, at) for at in near_columns],
                "near": [[exact(value) for value in line] for line in near],
                "at": [rows.start - near_rows.start, columns.start - near_columns.start],
            }
        )

    @answers(kinds.LABELS)
    def _give_labels(self, question: Question) -> Answer:
        axis, first, last = int(question["axis"]), int(question["first"]), int(question["last"])
        last = min(last, first + _MAX_LABELS)
        return Answer({"axis": axis, "first": first, "labels": (self._labels[axis] or [])[first:last]})

    # -- where no widget runs ------------------------------------------------------------------

    def plain(self) -> str:
        """As in ``"Heatmap of hidden: bfloat16, 12 × 4,096"``."""
        return f"Heatmap of {self.name}: {self.dtype}, {shape_words(self._source_shape)}"

    def fallback(self) -> str:
        """A picture with its words; a table where there are few values."""
        leads = tuple(0 for _ in self._tiles.leads)
        title = f"{self.name}{index_text((*leads, *2 * (slice(None),))) if leads else ''}".replace(
            "None:None", ":"
        )
        about = f"{self.dtype}, {shape_words(self._source_shape)}, {self.size}"
        head = f"<b>{html.escape(title)}</b> {html.escape(about)}"
        if not self._tiles.rows * self._tiles.columns or 0 in self._source_shape:
            body = "<div>It is empty: there is nothing to draw.</div>"
        elif self._tiles.rows <= _TABLE[0] and self._tiles.columns <= _TABLE[1]:
            body = self._table(leads)
        else:
            image, words = self._picture(leads, _PICTURE)
            if not self.poster:
                self.poster = self._picture(leads, _POSTER)[0]
            style = "width:100%;max-width:640px;height:auto;min-height:80px;max-height:320px;"
            style += "image-rendering:pixelated"
            body = (
                f'<img src="{image}" alt="{html.escape(self.described)}" style="{style}">'
                f"<div>{html.escape(words)}</div>"
            )
        return f'<div style="color:inherit"><div>{head}</div>{body}</div>'

    def _picture(self, leads: Leads, most: tuple[int, int]) -> tuple[str, str]:
        """A picture no larger than that as a data address, and what it shows."""
        rows, columns = self._tiles.rows, self._tiles.columns
        how, scale, clip = self.settings["how"], self.settings["scale"], self.settings["clip"]
        level = Level(_halvings(rows, most[0]), _halvings(columns, most[1]))
        clip = clip if isinstance(clip, str) else (clip[0], clip[1])
        if rows * columns <= _EXACT_VALUES:
            blocks = reduce_blocks(self._numbers(leads), 2**level.rows, 2**level.columns, how)
            span = self._tiles.span(leads, how, level, scale, clip)
            size = 2 ** (level.rows + level.columns)
            words = (
                f"Shown 1 of {size:,} values: {how} of {2**level.rows:,} × {2**level.columns:,}."
                if size > 1
                else ""
            )
            some = counted(blocks.nan, blocks.posinf, blocks.neginf)
            words += f" {some}." if some else ""
            if rows == 1:
                return _address(_plot(blocks.values[0].numpy(), most[0] // 2), "sequential"), words.strip()
            codes = self._tiles.codes(blocks, span)
        else:
            span = self._tiles.span(leads, how, Level(0, 0), scale, clip if clip != "full" else "robust")
            codes = self._tiles.preview(leads, span)
            steps = [-(-codes.shape[0] // most[0]), -(-codes.shape[1] // most[1])]
            codes = np.ascontiguousarray(codes[:: steps[0], :: steps[1]])
            words = f"A sample: 1 of {rows * columns // max(1, codes.size):,} values."
        palette = "diverging-light" if span.scale == "diverging" else "sequential"
        of = "magnitudes, logarithmic, " if span.scale == "log" else ""
        words = f"Colours: {of}{short(span.low)} to {short(span.high)}. {words}"
        return _address(codes, palette), words.strip()

    def _numbers(self, leads: Leads) -> torch.Tensor:
        return numbers(self._tiles.values(leads, slice(0, self._tiles.rows), slice(0, self._tiles.columns)))

    def _table(self, leads: Leads) -> str:
        values = self._tiles.values(leads, slice(0, self._tiles.rows), slice(0, self._tiles.columns))
        cell = "padding:2px 8px;text-align:right;color:inherit;background:transparent"
        head = "".join(
            f'<th style="{cell}">{html.escape(self._label(1, at))}</th>' for at in range(self._tiles.columns)
        )
        lines = "".join(
            f'<tr><th style="{cell}">{html.escape(self._label(0, at))}</th>'
            + "".join(f'<td style="{cell}">{html.escape(exact(value))}</td>' for value in line)
            + "</tr>"
            for at, line in enumerate(values)
        )
        return f'<table style="border-collapse:collapse"><tr><th></th>{head}</tr>{lines}</table>'

    def _described(self) -> str:
        axes = ", ".join(f"{name} {size:,}" for name, size in zip(self.axes, self._source_shape, strict=True))
        return f"{self.plain()}{' (' + axes + ')' if axes else ''}, {self.size}."

    # -- its life ------------------------------------------------------------------------------

    def looked_at(self) -> None:
        """The tensor stays while it is looked at."""
        if self.source is not None:
            self.source.hold()

    def out_of_sight(self) -> None:
        """Nothing is kept for nobody: neither what was computed, nor a tensor that only this would hold."""
        self._tiles.forget()
        if self.source is not None:
            self.source.loosen()

    def released(self) -> None:
        """Let go of the tensor."""
        self._tiles.release()
        self._labels = [None, None]

    # -- inside --------------------------------------------------------------------------------

    def _leads(self, question: Question) -> Leads:
        leads = tuple(int(index) for index in question.get("leads", ()))
        if len(leads) != len(self._tiles.leads) or any(
            not 0 <= index < size for index, size in zip(leads, self._tiles.leads, strict=True)
        ):
            raise CellUsageError(
                f"{list(leads)} is no place in the leading dimensions {list(self._tiles.leads)}"
            )
        return leads

    def _at(self, question: Question) -> tuple[Leads, Level, int, int]:
        level = Level(*question.get("level", (0, 0)))
        row, column = int(question["row"]), int(question["column"])
        if not (
            0 <= row << level.rows < self._tiles.rows and 0 <= column << level.columns < self._tiles.columns
        ):
            raise CellUsageError(f"row {row:,}, column {column:,} lies outside the picture")
        return self._leads(question), level, row, column

    def _ranges(self, level: Level, row: int, column: int) -> tuple[range, range]:
        high, wide = 2**level.rows, 2**level.columns
        return (
            range(row * high, min((row + 1) * high, self._tiles.rows)),
            range(column * wide, min((column + 1) * wide, self._tiles.columns)),
        )

    def _where(self, level: Level, row: int, column: int) -> str:
        parts = []
        axes = ["", *self.axes][-2:] if len(self._source_shape) == 1 else self.axes[-2:]
        for axis, (name, at) in enumerate(zip(axes, self._ranges(level, row, column), strict=False)):
            if len(self._source_shape) == 1 and axis == 0:
                continue
            many = f" to {self._label(axis, at.stop - 1)}" if len(at) > 1 else ""
            parts.append(f"{name} {self._label(axis, at.start)}{many}")
        return ", ".join(parts)

    def _label(self, axis: int, at: int) -> str:
        labels = self._labels[axis]
        number = f"{at + (self.places[axis] or 0):,}"
        return number if labels is None else f"{number} {labels[at]!r}"

    def _index(self, leads: Leads, row: int | slice, column: int | slice) -> tuple[int | slice, ...]:
        return (*leads, row, column)[-len(self._source_shape) :] if self._source_shape else ()


def _one_of(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise CellUsageError(
            f"{what}={given!r} is not one of {', '.join(map(repr, known))}.{nearest(str(given), known)}"
        )


def _how(question: Question) -> How:
    _one_of("how", question["how"], HOWS)
    how: How = question["how"]
    return how


def _clip_of(clip: Any, scale: str) -> str | tuple[float, float]:
    if isinstance(clip, str):
        _one_of("clip", clip, spans.CLIPS)
        return clip
    try:
        low, high = (float(end) for end in clip)
    except (TypeError, ValueError):
        raise CellUsageError(f"clip={clip!r} is neither 'robust', 'full' nor two numbers") from None
    if not low < high or (scale == "log" and low <= 0):
        raise CellUsageError(
            f"clip={clip!r}: the first must be less than the second, and positive for a log scale"
        )
    return low, high


def _labels_of(given: Sequence[Any] | None, size: int, what: str) -> list[str] | None:
    if given is None:
        return None
    if len(given) != size:
        raise CellUsageError(f"{what} has {len(given):,} labels, and there are {size:,} {what}")
    return [str(label) for label in given]


def _ids_of(source: Source) -> tuple[int, ...]:
    """The tokens of the prompt that a saved value belongs to."""
    return source.prompt_ids if isinstance(source, SavedSource) else ()


def _axes_of_length(shape: tuple[int, ...], length: int) -> list[int]:
    """Which of rows (0) and columns (1) are that many; one of 1-D has columns only."""
    drawn = shape[-2:] if len(shape) > 1 else (-1, *shape)
    return [axis for axis, size in enumerate(drawn) if size == length]


def _token_axes(
    shape: tuple[int, ...], tokens: Sequence[str] | None, ids: Sequence[int] | None, wanted: str
) -> list[int]:
    _one_of("token_axis", wanted, ("auto", "rows", "columns", "both"))
    if isinstance(tokens, (str, bytes)):
        raise CellUsageError("tokens is one text: give a list with each token's text")
    if tokens is not None and ids is not None and len(tokens) != len(ids):
        raise CellUsageError(f"{len(ids):,} token ids do not fit {len(tokens):,} tokens")
    length = len(tokens if tokens is not None else ids or ())
    fitting = _axes_of_length(shape, length)
    asked = {"auto": fitting, "rows": [0], "columns": [1], "both": [0, 1]}[wanted]
    if not asked or not set(asked) <= set(fitting):
        where = "rows or columns" if wanted == "auto" else "rows and columns" if wanted == "both" else wanted
        raise CellUsageError(f"{length:,} tokens do not fit the {where} of shape {list(shape)}")
    return asked


def _axes_of(given: Sequence[str] | None, dims: int) -> list[str]:
    names = [f"dim {dim}" for dim in range(dims)]
    if dims == 2:
        names = ["row", "column"]
    elif dims == 1:
        names = ["index"]
    if given is None:
        return names
    if len(given) > dims:
        raise CellUsageError(f"axes has {len(given)} names, and there are {dims} dimensions")
    return [*names[: dims - len(given)], *map(str, given)]


def _halvings(size: int, most: int) -> int:
    count = 0
    while -(-size // 2**count) > most:
        count += 1
    return count


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _address(codes: npt.NDArray[np.uint8], palette: str) -> str:
    return "data:image/png;base64," + base64.b64encode(colours.picture(codes, palette)).decode()


def _plot(line: npt.NDArray[np.floating], height: int) -> npt.NDArray[np.uint8]:
    """The codes of a picture of a line ``[value]``."""
    codes = np.full((height, line.size), spans.CODE_NONE, dtype=np.uint8)
    finite = np.isfinite(line)
    if finite.any():
        span = spans.span_of(line[finite].astype(np.float64), "sequential", robust=False)
        at = spans.encode(line, np.zeros(line.shape, dtype=np.uint8), span).astype(int)
        heights = (spans.TOP - at.clip(0, spans.TOP)) * (height - 1) // spans.TOP
        for column in np.nonzero(finite)[0]:
            near = [heights[column]]
            if column and finite[column - 1]:
                near.append((heights[column - 1] + heights[column]) // 2)
            if column + 1 < line.size and finite[column + 1]:
                near.append((heights[column + 1] + heights[column]) // 2)
            codes[min(near) : max(near) + 1, column] = spans.TOP // 2
    return codes

"""Attention patterns to look through: every head small, one large, and where each token looks.

A model of 30 layers has hundreds of heads, and a pattern of a thousand tokens a million numbers, so a page
gets a thumbnail of the heads in sight, tiles of the head that is enlarged, and one row of each head of a
layer for the token somebody points at. The large picture is a `Heatmap`'s, of the layer and head that were
chosen; weights are drawn on a logarithmic scale unless told otherwise, since a head that looks at fifty
tokens gives each two percent. A weight below one percent is drawn as none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F
import traitlets

from nnsight_lab.errors import CellUsageError, SavesError
from nnsight_lab.lens.attention import Attention
from nnsight_lab.lens.shown import Several
from nnsight_lab.lens.tokens import shortened, visible
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import MAX_BUFFER_BYTES, Answer, Question, answers, long
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.prompts import Prompts, listed
from nnsight_lab.widgets.sequences import sequence_key
from nnsight_lab.widgets.sources import TensorSource
from nnsight_lab.widgets.spans import Span, encode
from nnsight_lab.widgets.tiles import Tiles

#: A side of a thumbnail, in dots.
THUMB: Final = 48
#: What colours span, by the name of the scale.
SPANS: Final = {"log": (0.01, 1.0), "sequential": (0.0, 1.0)}
_LABEL_CHARACTERS: Final = 40


class AttentionView(Heatmap):
    """Attention patterns: layers by heads as small pictures, the chosen one large, tokens on both axes.

    A notebook shows it for `Attention` itself, and for the list of several prompts.

    Args:
        attention: An `Attention`, or a list of them.
        height: Of the large picture at the most, in pixels.

    Raises:
        CellUsageError: It is no attention.
    """

    module: ClassVar[str] = "attention"

    prompts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    count = traitlets.Int().tag(sync=True)

    def __init__(self, attention: Attention | Sequence[Attention], *, height: int = 420) -> None:
        self._patterns: Prompts[Attention] = Prompts(attention, Attention)
        self._asked_of = threading.local()
        self._parts: dict[int, dict[str, Any]] = {}
        several = [self._patterns[index] for index in range(self._patterns.count)]
        self._said = repr(several[0])[1:-1]
        super().__init__(
            several[0].patterns,
            name="attention.patterns",
            axes=["layer", "head", "query", "key"],
            how="max",
            scale="log",
            clip=SPANS["log"],
            height=height,
        )
        self._parts.clear()  # made from the patterns when they are asked for
        self.prompts = listed([one.tokens for one in several])
        self.count = len(several)
        self.labelled = [bool(several[0].tokens)] * 2

    # -- of which prompt a question is -----------------------------------------------------------

    def _safely(self, question: Question, work: Callable[[], None]) -> None:
        self._asked_of.prompt = question.get("prompt", 0)
        super()._safely(question, work)

    def _part(self) -> dict[str, Any]:
        """What the picture of the prompt that is asked about stands on."""
        prompt = int(getattr(self._asked_of, "prompt", 0))
        part = self._parts.get(prompt)
        if part is None or "tiles" not in part:
            found = self._patterns[prompt]
            tokens = [_short(token) for token in found.tokens]
            whole = found.queries == tuple(range(len(tokens)))
            asks = tokens if whole else [f"{at}: {tokens[at]}" for at in found.queries]
            part = self._parts[prompt] = {
                "tiles": Tiles(TensorSource(found.patterns)),
                "labels": [asks, tokens],
                "shape": tuple(found.patterns.shape),
            }
        return part

    # `Heatmap` knows one tensor; here it is that of the prompt.

    @property
    def _tiles(self) -> Tiles:
        tiles: Tiles = self._part()["tiles"]
        return tiles

    @_tiles.setter
    def _tiles(self, tiles: Tiles) -> None:
        """They are made when they are asked for."""

    @property
    def _labels(self) -> list[list[str] | None]:
        labels: list[list[str] | None] = self._part()["labels"]
        return labels

    @_labels.setter
    def _labels(self, labels: list[list[str] | None]) -> None:
        """They are the prompt's tokens."""

    @property
    def _source_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._part()["shape"]
        return shape

    @_source_shape.setter
    def _source_shape(self, shape: tuple[int, ...]) -> None:
        """It is that of the prompt."""

    # -- what the browser asks -----------------------------------------------------------------

    @answers(kinds.PROMPT)
    def _give_prompt(self, question: Question) -> Answer:
        """What a page must know of a prompt before it draws."""
        found = self._patterns[int(question["prompt"])]
        whole = found.queries == tuple(range(len(found.tokens)))
        return Answer(
            {
                "layers": list(found.layers),
                "heads": list(found.heads),
                "queries": None if whole else list(found.queries),
                "sizes": list(found.patterns.shape),
                "sequence": sequence_key(found.token_ids, found.tokens),
            }
        )

    @answers(kinds.HEADS)
    @long
    def _give_heads(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        """Thumbnails of layers: for each, the codes ``[head, row, column]`` of its patterns."""
        found = self._patterns[int(question["prompt"])]
        span = _span(question)
        for layer in question["layers"]:
            if stopped():
                return
            if not 0 <= int(layer) < len(found.layers):
                raise CellUsageError(f"there is no layer {int(layer)} among these {len(found.layers)}")
            thumbs = np.stack([_thumb(pattern, span) for pattern in found.patterns[int(layer)]])
            per_buffer = max(1, MAX_BUFFER_BYTES // max(1, thumbs[0].size))
            buffers = tuple(
                thumbs[first : first + per_buffer].tobytes() for first in range(0, len(thumbs), per_buffer)
            )
            yield Answer({"layer": int(layer), "sizes": list(thumbs.shape[1:])}, buffers)

    @answers(kinds.CELL)
    def _give_query(self, question: Question) -> Answer:
        """Where one query looks: for each head of a layer its weights over the keys, float32."""
        found = self._patterns[int(question["prompt"])]
        layer, query = int(question["layer"]), int(question["query"])
        if not (0 <= layer < len(found.layers) and 0 <= query < len(found.queries)):
            raise CellUsageError(f"layer {layer:,}, query {query:,} lies outside the patterns")
        rows = found.patterns[layer, :, query].to(torch.float32)
        return Answer({}, tuple(row.contiguous().numpy().tobytes() for row in rows))

    # -- where no widget runs ------------------------------------------------------------------

    def plain(self) -> str:
        """As in ``"Attention [layer, head, query, key] 30 x 9 x 12 x 12"``."""
        more = f" (and of {self._patterns.count - 1:,} more prompts)" if self._patterns.count > 1 else ""
        return f"{self._said}{more}"

    def fallback(self) -> str:
        """Some heads as pictures."""
        try:
            return Several(self._patterns.first(Several.MOST_IN_HTML), of=self._patterns.count)._repr_html_()
        except SavesError:  # it is gone, and its words are left
            return f"<div>{self.plain()}</div>"

    # -- its life ------------------------------------------------------------------------------

    def looked_at(self) -> None:
        """The patterns stay while they are looked at."""
        self._patterns.hold()

    def out_of_sight(self) -> None:
        """And no longer than others hold them."""
        self._let_go()

    def released(self) -> None:
        """Let go of them."""
        self._let_go()

    def _let_go(self) -> None:
        self._patterns.loosen()
        parts = list(self._parts.values())
        self._parts.clear()
        for part in parts:
            part["tiles"].release()


def _thumb(pattern: torch.Tensor, span: Span) -> Any:
    """The codes ``[row, column]`` of a pattern ``[query, key]``: of each block its largest weight."""
    sides = tuple(min(size, THUMB) for size in pattern.shape)
    small = F.adaptive_max_pool2d(pattern[None, None].to(torch.float32), sides)[0, 0].numpy()
    flags = np.isnan(small).astype(np.uint8)
    return encode(small, flags, span)


def _span(question: Question) -> Span:
    scale = str(question["scale"])
    if scale not in SPANS:
        raise CellUsageError(f"scale={scale!r} is not one of {', '.join(map(repr, SPANS))}")
    return Span(*SPANS[scale], scale)


def _short(text: str) -> str:
    return shortened(visible(text), _LABEL_CHARACTERS) or "∅"

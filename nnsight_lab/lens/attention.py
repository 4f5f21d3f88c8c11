"""Attention patterns, as they came home: plain CPU data with the prompt they belong to."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from typing import ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F

from nnsight_lab.errors import LensRefused
from nnsight_lab.lens.png import png
from nnsight_lab.lens.shown import Shown

#: Where no view can be: how many heads are drawn, and how many queries and keys of each at the most.
_DRAWN_HEADS: Final = 8
_DRAWN_TOKENS: Final = 96
_DRAWN_PX: Final = 144


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Shown):
    """How much each query of one prompt attends to each key.

    Attributes:
        patterns: ``[layer, head, query, key]``, float32 or float16, on the CPU. A row sums to 1, or less
            where the model has attention sinks; keys after the query are 0.
        layers: The model's layer numbers, in the order of the first axis.
        heads: Its head numbers, in the order of the second.
        queries: Places in the prompt, in the order of the third; the fourth is the whole prompt.
        token_ids: The prompt.
        tokens: Their text.
    """

    patterns: torch.Tensor
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]

    view: ClassVar[str] = "nnsight_lab.widgets.attention:AttentionView"

    def pattern(self, layer: int, head: int) -> torch.Tensor:
        """One head's pattern ``[query, key]``, by the model's own numbers.

        Raises:
            LensRefused: When that layer or head is not among those asked for.
        """
        if layer not in self.layers:
            raise LensRefused(f"Layer {layer} is not here; there are {_listed(self.layers)}.")
        if head not in self.heads:
            raise LensRefused(f"Head {head} is not here; there are {_listed(self.heads)}.")
        return self.patterns[self.layers.index(layer), self.heads.index(head)]

    def __repr__(self) -> str:
        shape = " x ".join(str(size) for size in self.patterns.shape)
        return f"<Attention [layer, head, query, key] {shape}>"

    def _repr_html_(self) -> str:
        """Some heads of the last layer as pictures, and what is left out."""
        layer, drawn = len(self.layers) - 1, range(min(len(self.heads), _DRAWN_HEADS))
        figures = "".join(self._figure(layer, head) for head in drawn)
        said = [
            f"Attention of layer {self.layers[layer]}: queries downward, keys across, stronger where a query "
            "attends more."
        ]
        if len(drawn) < len(self.heads):
            said.append(f"{len(drawn)} of {len(self.heads)} heads are drawn.")
        if layer:
            said.append(f"Of {len(self.layers)} layers one is drawn.")
        if max(self.patterns.shape[2:]) > _DRAWN_TOKENS:
            most = "the largest weight of its block"
            said.append(f"{len(self.queries):,} queries x {len(self.tokens):,} keys: each dot is {most}.")
        return (
            '<div style="color:inherit;font-size:var(--jp-ui-font-size1,13px)">'
            f'<div>{escape(" ".join(said))}</div><div style="display:flex;flex-wrap:wrap;gap:8px">{figures}'
            "</div></div>"
        )

    def _figure(self, layer: int, head: int) -> str:
        pattern = self.patterns[layer, head].float()
        sides = tuple(min(size, _DRAWN_TOKENS) for size in pattern.shape)
        small = F.adaptive_max_pool2d(pattern[None, None], sides)[0, 0].nan_to_num()
        codes = (small.clamp(0, 1).sqrt() * 255).round().byte().numpy()  # most weights are small
        ramp = np.zeros((256, 4), dtype=np.uint8)
        ramp[:, :3], ramp[:, 3] = (25, 118, 210), np.arange(256)  # on a light page as on a dark one
        picture = base64.b64encode(png(codes, ramp)).decode()
        name = f"layer {self.layers[layer]}, head {self.heads[head]}"
        style = (
            f"display:block;width:{_DRAWN_PX}px;height:{_DRAWN_PX}px;image-rendering:pixelated;"
            "border:1px solid var(--jp-border-color1,#888)"
        )
        return (
            f'<figure style="margin:4px 0"><img alt="Attention of {name}" style="{style}" '
            f'src="data:image/png;base64,{picture}"><figcaption>head {self.heads[head]}</figcaption></figure>'
        )


def _listed(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)})"

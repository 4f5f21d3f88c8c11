"""Attention patterns, as they came home: plain CPU data with the prompt they belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nnsight_lab.errors import LensRefused


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
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


def _listed(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)})"

"""A logit lens, as it came home: what each layer would say at each token, as plain CPU data.

The logit lens (nostalgebraist, "interpreting GPT: the logit lens", LessWrong 2020) puts the residual
stream after each layer through the model's own final norm and unembedding. Only what is read of the
logits is here: top tokens, entropy, and where the model's own next token and a target stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from nnsight_lab.errors import LensRefused
from nnsight_lab.lens.grid import Cell, grid
from nnsight_lab.lens.shown import Shown
from nnsight_lab.lens.tokens import shortened, visible


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens(Shown):
    """What each layer would say next, at each position of one prompt.

    All tensors are on the CPU and own their memory. "Final" is the token that the last layer, so the model
    itself, finds likeliest at that position. A rank counts the likelier tokens: 0 is the top.

    Attributes:
        layers: The model's layer numbers, in the order of the first axis.
        positions: Places in the prompt, in the order of the second axis.
        token_ids: The prompt; empty where only a stream was given.
        tokens: Their text.
        top_ids: ``[layer, position, k]``, int64, best first.
        top_probabilities: ``[layer, position, k]``, float32.
        entropy: ``[layer, position]``, float32, nats.
        final_ids: ``[position]``, int64; None where a stream was given without the last layer.
        final_ranks: ``[layer, position]``, int64, or None.
        final_probabilities: ``[layer, position]``, float32, or None.
        target_id: The token asked for, or None.
        target_ranks: ``[layer, position]``, int64, or None.
        target_probabilities: ``[layer, position]``, float32, or None.
        texts: The text of every token that appears.
    """

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    top_ids: torch.Tensor
    top_probabilities: torch.Tensor
    entropy: torch.Tensor
    final_ids: torch.Tensor | None
    final_ranks: torch.Tensor | None
    final_probabilities: torch.Tensor | None
    target_id: int | None
    target_ranks: torch.Tensor | None
    target_probabilities: torch.Tensor | None
    texts: Mapping[int, str]

    view: ClassVar[str] = "nnsight_lab.widgets.lens:LensView"

    @property
    def top_tokens(self) -> list[list[list[str]]]:
        """The text of the top tokens, ``[layer][position][k]``."""
        return [[[self.texts[i] for i in row] for row in layer] for layer in self.top_ids.tolist()]

    @property
    def final_tokens(self) -> list[str]:
        """The text of the model's own next token at each position; empty where it is not known."""
        return [] if self.final_ids is None else [self.texts[i] for i in self.final_ids.tolist()]

    @property
    def target(self) -> str | None:
        """The target's text."""
        return None if self.target_id is None else self.texts[self.target_id]

    def __repr__(self) -> str:
        said = ""
        if self.final_ids is not None and self.positions:
            said = f", at the end {self.final_tokens[-1]!r}"
        return (
            f"<LogitLens {_many(len(self.layers), 'layer')} x {_many(len(self.positions), 'position')}, "
            f"top {self.top_ids.shape[-1]}{said}>"
        )

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each layer, position and place among the top.

        Raises:
            LensRefused: When pandas is not installed.
        """
        try:
            import pandas as pd  # not a dependency
        except ImportError:
            raise LensRefused("to_pandas needs pandas, which is not installed: pip install pandas") from None

        layers, positions, top_k = self.top_ids.shape

        def spread(values: torch.Tensor) -> list[Any]:
            column: list[Any] = values[:, :, None].expand(layers, positions, top_k).flatten().tolist()
            return column

        by_position = torch.tensor(self.positions).expand(layers, positions)
        ids = self.top_ids.flatten().tolist()
        columns: dict[str, list[Any]] = {
            "layer": spread(torch.tensor(self.layers)[:, None].expand(layers, positions)),
            "position": spread(by_position),
            "place": list(range(top_k)) * (layers * positions),
            "token_id": ids,
            "token": [self.texts[i] for i in ids],
            "probability": self.top_probabilities.flatten().tolist(),
            "entropy": spread(self.entropy),
        }
        if self.tokens:
            columns["prompt_token"] = [self.tokens[i] for i in columns["position"]]
        optional = {
            "final_rank": self.final_ranks,
            "final_probability": self.final_probabilities,
            "target_rank": self.target_ranks,
            "target_probability": self.target_probabilities,
        }
        columns |= {name: spread(values) for name, values in optional.items() if values is not None}
        return pd.DataFrame(columns)

    def _repr_html_(self) -> str:
        """The likeliest token of each layer and position, last layer on top, coloured by probability."""
        rows = [
            (f"layer {number}", partial(self._cell, row))
            for row, number in reversed(list(enumerate(self.layers)))
        ]
        return grid(
            caption="Logit lens: the likeliest next token after each layer, stronger where likelier",
            columns=[self.tokens[p] if self.tokens else str(p) for p in self.positions],
            rows=rows,
        )

    def _cell(self, layer: int, position: int) -> Cell:
        ids = self.top_ids[layer, position, :5].tolist()
        shares = self.top_probabilities[layer, position, :5].tolist()
        lines = [
            f"{shortened(visible(self.texts[i]), 40)} {share:.1%}"
            for i, share in zip(ids, shares, strict=True)
        ]
        lines.append(f"entropy {float(self.entropy[layer, position]):.2f} nats")
        return Cell(self.texts[ids[0]], shares[0], "\n".join(lines))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

"""The locations that replays serve where nobody says otherwise: input and output of every decoder layer.

They are found in the module tree, as its longest list of modules. A kernel finds them in its own tree, which
has no weights; a server's front end has none, so there a word stands for them until the worker has the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch.nn import ModuleList

#: Stands for the input and the output of every decoder layer.
DECODER_LAYERS: Final = "decoder layers"


def decoder_layers(module: Any) -> tuple[str, ...]:
    """The input and the output of every decoder layer, as the tree over ``module`` calls them."""
    lists = [(len(found), name) for name, found in module.named_modules() if isinstance(found, ModuleList)]
    count, name = max(lists, default=(0, ""))
    return tuple(f"model.{name}.{index}.{side}" for index in range(count) for side in ("input", "output"))


def spelled_out(taps: Iterable[str], module: Any) -> frozenset[str]:
    """Taps with locations in the place of the word that stands for them."""
    found = frozenset(taps)
    if DECODER_LAYERS in found:
        found = found - {DECODER_LAYERS} | frozenset(decoder_layers(module))
    return found

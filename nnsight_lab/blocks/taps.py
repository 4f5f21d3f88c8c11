"""Which modules of a model are its decoder layers: what CUDA graphs serve where nobody chose.

Asked of the engine's own modules, in the worker: the kernel builds its weightless tree while the engine
starts, and so cannot say before. One name stands for all of them until then.
"""

from __future__ import annotations

from torch.nn import Module, ModuleList

#: Stands for the input and the output of every decoder layer.
DECODER_LAYERS = "decoder layers"


def resolved(taps: tuple[str, ...], module: Module) -> tuple[str, ...]:
    """The locations that ``taps`` name; those of every decoder layer where they are `DECODER_LAYERS`."""
    if taps != (DECODER_LAYERS,):
        return taps
    lists = [(len(found), name) for name, found in module.named_modules() if isinstance(found, ModuleList)]
    count, name = max(lists, default=(0, ""))
    return tuple(f"model.{name}.{index}.{side}" for index in range(count) for side in ("input", "output"))

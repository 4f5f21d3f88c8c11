"""The served model's modules, as a kernel needs them to write blocks."""

from __future__ import annotations

import torch

from nnsight_lab.wire.serving import ModuleSeen


def modules_seen(model: torch.nn.Module) -> list[ModuleSeen]:
    """Every module, parents before children; one that stands in two places once for each.

    Args:
        model: On this rank; of a tensor-parallel model the parameters' shapes are this rank's.
    """
    return [
        ModuleSeen(
            path,
            type(module).__name__,
            tuple(
                (name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
                for name, parameter in module.named_parameters(recurse=False)
            ),
        )
        for path, module in model.named_modules(remove_duplicate=False)
    ]

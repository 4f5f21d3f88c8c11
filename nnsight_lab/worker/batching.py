"""Serve a block its own rows as a private copy, written back when the block yields.

vLLM's fused kernels overwrite activation buffers in place, so a *view* of one, which is what
nnsight serves, holds a later layer's data once the block has moved on: an unclone'd ``.save()``
was off by 3.5 on an H200, silently. nnsight's own cure (``NNSIGHT_VLLM_CLONE_READS``) loses every
in-place edit, silently too. Here a block reads a copy of its rows, edits it as it likes, and the
copy goes back into the model's buffer when the block parks elsewhere or ends: what it keeps is its
own, and what it wrote reaches the model. One copy per read location, visit and block.

`skip` of one request while others share the step is the second fault mended here: stock nnsight
raises inside the forward, which ends the engine for everybody.
"""

from __future__ import annotations

from typing import Any

import torch
from nnsight.intervention.source import NO_SKIP
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.util import apply


class Visit:
    """The copies one block was served at one location, until it yields."""

    def __init__(self) -> None:
        #: The model's value -> what the block was served for it; the value is kept alive here.
        self.served: list[tuple[Any, Any]] = []
        #: (rows of the model's buffer, the block's copy)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def write_back(self) -> None:
        """Land the block's copies in the model's buffer, and forget them."""
        for rows, copy in self.pairs:
            # A block may resize or retype its own copy; the model's rows stay what they are.
            if copy.shape == rows.shape:
                rows.copy_(copy)
        self.pairs.clear()
        self.served.clear()


class LabBatcher(VLLMBatcher):
    """nnsight's row arithmetic, with private copies and partial skips."""

    def __init__(self, envoy: Any, kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(envoy, kwargs)
        self.clone_reads = False  # private copies make nnsight's own switch pointless
        self.visit: Visit | None = None
        #: Replacements of a skip that does not cover the whole step: ``(group, value)``.
        self.partial_skip: list[tuple[list[int], Any]] = []

    def narrow(self, value: Any, group: list[int] | None) -> Any:
        """The rows of ``group`` as a copy; repeated reads of one visit share it."""
        if group is None:
            return value
        visit = self.visit
        if visit is not None:
            for seen, served in visit.served:
                if seen is value:
                    return served
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def private(tensor: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self._narrow_tensor(tensor, group)
            if rows is tensor:
                return tensor  # no token axis: not a buffer of this step
            copy = rows.clone(memory_format=torch.contiguous_format)
            pairs.append((rows, copy))
            return copy

        served = apply(value, private, torch.Tensor)
        if visit is not None:
            visit.served.append((value, served))
            visit.pairs.extend(pairs)
        return served

    def widen(self, full: Any, group: list[int] | None, edited: Any) -> Any:
        """Splice an assigned value in, after what the block wrote in place before it."""
        if self.visit is not None:
            self.visit.write_back()
        return super().widen(full, group, edited)

    def assemble_skip(self, running: Any) -> Any:
        """The combined skip, or "run the module" with the replacements kept for its output."""
        try:
            return super().assemble_skip(running)
        except ValueError:
            self.partial_skip = list(running.parts)
            return NO_SKIP


class LabInterleaver(VLLMInterleaver):
    """nnsight's handoff, with a skip of some rows spliced into the module's own output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spliced: dict[str, list[tuple[list[int], Any]]] = {}

    def handle(self, provider: str, value: Any) -> Any:
        path, _, side = provider.rpartition(".")
        if side == "output" and self.spliced and path in self.spliced:
            for group, replacement in self.spliced.pop(path):
                value = self.batcher.widen(value, group, replacement)
        value = super().handle(provider, value)
        batcher = self.batcher
        if batcher is not None and batcher.partial_skip:
            self.spliced[path] = batcher.partial_skip
            batcher.partial_skip = []
        return value

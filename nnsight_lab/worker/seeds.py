"""Seeded requests whose prompt runs in pieces, on a CPU.

vLLM samples after each piece of a prompt, drops what it drew, and turns the request's random generator back
by the offset that CUDA's generators have. Those of a CPU have none: one seeded request with a long prompt
ends the engine ("CPU Generator does not use offset"). Here they get one, of a sort: they are put back to
where they were before a draw that is dropped.
"""

from __future__ import annotations

from typing import Any

import torch


class Rewinding(torch.Generator):
    """A CPU's generator that can be turned back to where it was last marked."""

    marked: torch.Tensor | None = None

    def mark(self) -> None:
        """What is drawn from now on may be dropped."""
        self.marked = self.get_state()

    def get_offset(self) -> int:
        """None, in truth."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Back to the mark: vLLM turns back by one draw, and asks for nothing else."""
        if self.marked is not None:
            self.set_state(self.marked)
        return self


def rewindable(states: Any, batch: Any, new: list[str]) -> None:
    """Give new requests that are seeded generators that can be turned back.

    Args:
        states: vLLM's, by request.
        batch: vLLM's ``InputBatch``, which has the generators by row.
        new: Requests that came in this step.
    """
    for request_id in new:
        state = states.get(request_id)
        given = None if state is None else state.generator
        if given is None or isinstance(given, Rewinding):
            continue
        state.generator = Rewinding(device=given.device)
        state.generator.set_state(given.get_state())
        row = batch.req_id_to_index.get(request_id)
        if row in batch.generators:
            batch.generators[row] = state.generator


def mark(batch: Any) -> None:
    """Before a draw: mark every generator of the batch."""
    for generator in batch.generators.values():
        if isinstance(generator, Rewinding):
            generator.mark()

"""What the blocks of finished requests brought home, put where a caller looks for it.

nnsight keeps the error of an edit's block on the output and raises nothing; here every call looks,
and raises the first one once, with how many requests it failed and all outputs at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_lab.blocks.errors import block_error
from nnsight_lab.engine.step_words import RanSteps
from nnsight_lab.errors import LabError, OverBudget
from nnsight_lab.saves.request import Saves
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.messages import RequestSaves, WorkerError


def attach(output: Any, saves: RequestSaves | None, no_graphs: str = "") -> None:
    """Put a request's saves on its ``RequestOutput``: on each completion, and the first one's on top.

    Args:
        output: vLLM's; gets ``.saves``, ``.error`` (one line, or None) and ``.steps`` (how they ran; None
            where no block did).
        saves: As collected; None where no block ran.
        no_graphs: Why the engine replays nothing, where it does not.
    """
    sequences = {s.index: s for s in saves.sequences} if saves is not None else {}
    for completion in output.outputs:
        sequence = sequences.get(completion.index)
        blocks = {b.block: b.values for b in sequence.blocks} if sequence is not None else {}
        completion.saves = Saves(blocks)
    output.saves = output.outputs[0].saves if output.outputs else Saves()
    found = first_error(saves)
    output.error = None if found is None else one_line(found[1])
    output.steps = None if saves is None else RanSteps.of(saves.steps, no_graphs)


def first_error(saves: RequestSaves | None) -> tuple[str, WorkerError] | None:
    """A request's first error and whose block it is: its own, then its trace's, then its edits'."""
    if saves is None:
        return None
    if saves.error is not None:
        return TRACE_BLOCK, saves.error
    found = [
        (block.block, block.error)
        for sequence in saves.sequences
        for block in sequence.blocks
        if block.error is not None and not block.error.control_flow
    ]
    found.sort(key=lambda pair: pair[0] != TRACE_BLOCK)
    return found[0] if found else None


def runs(saves: RequestSaves | None) -> dict[str, str | None]:
    """Each block that ran on a request, and its error in one line where it failed."""
    seen: dict[str, str | None] = {}
    for sequence in saves.sequences if saves is not None else ():
        for block in sequence.blocks:
            error = block.error
            bad = error is not None and not error.control_flow
            seen[block.block] = seen.get(block.block) or (one_line(error) if error and bad else None)
    return seen


def failure(saves: Sequence[RequestSaves | None], outputs: Sequence[Any]) -> LabError | None:
    """The error to raise for a call: that of its first failed request, counted over all."""
    failed = [found for found in map(first_error, saves) if found is not None]
    if not failed:
        return None
    block, error = failed[0]
    if error.type_name == OverBudget.__name__:
        counted = f" ({len(failed)} of {len(saves)} requests)" if len(saves) > 1 else ""
        return OverBudget(f"{error.message}{counted}.")
    return block_error(error, block=block, failed=len(failed), total=len(saves), outputs=outputs)


def one_line(error: WorkerError) -> str:
    """An error as its type and message."""
    return f"{error.type_name}: {error.message}"

"""The messages themselves: frozen dataclasses that hold what was said, and nothing that acts.

Two families. Records of a request are a vLLM output as plain data, under vLLM's own attribute names, so
that ``tracer.result.outputs[0].text`` reads the same on every kind of engine. Saves of a request are
grouped as nnsight groups them (request, sequence, block) and carry the block's error beside them, since
nnsight raises nothing itself. vLLM is not imported here: its outputs are read by attribute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nnsight_lab.wire.extent import Packed
from nnsight_lab.wire.registry import LATER, register
from nnsight_lab.wire.step_figures import StepFigures


@register
@dataclass(frozen=True)
class CompletionRecord:
    """One completion of a request; attributes as in vLLM's ``CompletionOutput``.

    Attributes:
        index: Which of the request's completions.
        text: What was generated.
        token_ids: The generated tokens, one per position.
        cumulative_logprob: The sum over the generated tokens, where logprobs were asked for.
        logprobs: Per position, the log probability of each reported token id.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"``; None while it runs.
        stop_reason: The stop string or token id, where one ended it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, float], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this completion has ended (a method, as in vLLM)."""
        return self.finish_reason is not None

    @classmethod
    def of(cls, completion: Any) -> CompletionRecord:
        """The record of a vLLM ``CompletionOutput``."""
        total = completion.cumulative_logprob
        return cls(
            index=int(completion.index),
            text=str(completion.text),
            token_ids=_ids(completion.token_ids),
            cumulative_logprob=None if total is None else float(total),
            logprobs=_logprobs(completion.logprobs),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )


@register
@dataclass(frozen=True)
class RequestRecord:
    """A request and what came of it; attributes as in vLLM's ``RequestOutput``.

    Attributes:
        request_id: The engine's id of the request.
        prompt: The prompt's text, where it was given as text.
        prompt_token_ids: The prompt's tokens.
        outputs: Its completions, ``n`` of them.
        finished: Whether all of them have ended.
        metrics: vLLM's counters and timestamps of the request, where it reports any.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    outputs: tuple[CompletionRecord, ...]
    finished: bool
    metrics: dict[str, Any] | None = None

    @classmethod
    def of(cls, output: Any) -> RequestRecord:
        """The record of a vLLM ``RequestOutput``."""
        prompt = output.prompt
        ids = output.prompt_token_ids
        return cls(
            request_id=str(output.request_id),
            prompt=None if prompt is None else str(prompt),
            prompt_token_ids=None if ids is None else _ids(ids),
            outputs=tuple(map(CompletionRecord.of, output.outputs)),
            finished=bool(output.finished),
            metrics=_metrics(getattr(output, "metrics", None)),
        )


@register
@dataclass(frozen=True)
class Frame:
    """One frame of a traceback in the worker.

    Attributes:
        filename: As in the frame's code object.
        lineno: 1-based, in that file.
        function: What the frame was running.
        text: The line's source; empty when unknown.
    """

    filename: str
    lineno: int
    function: str
    text: str = ""


@register
@dataclass(frozen=True)
class WorkerError:
    """An exception of a block, as data.

    Attributes:
        type_name: The exception's class name.
        message: Its text.
        frames: Its traceback, outermost first.
        control_flow: Whether it only ended the block early (a deliberate stop) and nothing went wrong.
        requested: The module locations the block was waiting for, each with its iteration.
        order: The module locations in the order in which the model serves them.
    """

    type_name: str
    message: str
    frames: tuple[Frame, ...] = ()
    control_flow: bool = False
    requested: tuple[tuple[str, int], ...] = ()
    order: tuple[str, ...] = ()


# No `==` on the three below: their values hold tensors, whose own is another tensor.


@register
@dataclass(frozen=True, eq=False)
class BlockSaves:
    """What one block saved for one sequence.

    Attributes:
        block: ``"trace"``, or the edit's name.
        values: The saved values by the name they were saved under.
        error: Why the block ended early, if it did; what it saved until then is still here.
        packed: The same dictionary with its tensors in shared memory; ``values`` is then empty.
    """

    block: str
    values: dict[str, Any]
    error: WorkerError | None = None
    packed: Packed | None = None


@register
@dataclass(frozen=True, eq=False)
class SequenceSaves:
    """What all blocks saved for one completion of a request.

    Attributes:
        index: Which completion; as in `CompletionRecord`.
        blocks: One entry per block that ran.
    """

    index: int
    blocks: tuple[BlockSaves, ...] = ()


@register
@dataclass(frozen=True, eq=False)
class RequestSaves:
    """Everything that was saved for a request.

    Attributes:
        request_id: As in `RequestRecord`.
        sequences: One entry per completion.
        error: Why the saves as a whole could not be brought, if they could not.
        steps: How the steps ran that it took; None where there are no graphs, or where that is not told.
    """

    request_id: str
    sequences: tuple[SequenceSaves, ...] = ()
    error: WorkerError | None = None
    steps: StepFigures | None = field(default=None, metadata=LATER)


def _ids(ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, ids))


def _logprobs(positions: Iterable[Mapping[Any, Any] | None] | None) -> tuple[dict[int, float], ...] | None:
    if positions is None:
        return None
    # Iterated, not indexed: vLLM keeps them as a list of dicts or, flat, as something that gives dicts.
    return tuple(
        {int(token): float(entry.logprob) for token, entry in (position or {}).items()}
        for position in positions
    )


def _metrics(metrics: Any) -> dict[str, Any] | None:
    """The plain fields of vLLM's statistics, whose class differs by version."""
    if metrics is None:
        return None
    if isinstance(metrics, Mapping):
        named: Mapping[str, Any] = metrics
    elif dataclasses.is_dataclass(metrics):
        named = {field.name: getattr(metrics, field.name, None) for field in dataclasses.fields(metrics)}
    else:
        return None
    return {
        name: value for name, value in named.items() if isinstance(value, (bool, int, float, str, type(None)))
    }

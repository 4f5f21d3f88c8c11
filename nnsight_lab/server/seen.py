"""vLLM's outputs as the plain records that travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nnsight_lab.wire.serving import CompletionSeen, OutputSeen, TokenSeen


def output_seen(place: int, output: Any) -> OutputSeen:
    """A vLLM ``RequestOutput`` as it stands.

    Args:
        place: Its request's place in the call.
        output: vLLM's.
    """
    ids = output.prompt_token_ids
    return OutputSeen(
        place=place,
        prompt=None if output.prompt is None else str(output.prompt),
        prompt_token_ids=None if ids is None else tuple(map(int, ids)),
        completions=tuple(map(_completion, output.outputs)),
        finished=bool(output.finished),
        prompt_logprobs=_tokens(output.prompt_logprobs),
        num_cached_tokens=None if output.num_cached_tokens is None else int(output.num_cached_tokens),
    )


def _completion(completion: Any) -> CompletionSeen:
    total = completion.cumulative_logprob
    logprobs = _tokens(completion.logprobs)
    return CompletionSeen(
        index=int(completion.index),
        text=str(completion.text),
        token_ids=tuple(map(int, completion.token_ids)),
        cumulative_logprob=None if total is None else float(total),
        logprobs=None if logprobs is None else tuple(one or {} for one in logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def _tokens(
    positions: Iterable[Mapping[int, Any] | None] | None,
) -> tuple[dict[int, TokenSeen] | None, ...] | None:
    if positions is None:
        return None
    # Iterated, not indexed: vLLM keeps them as a list of dicts or, flat, as something that gives dicts.
    return tuple(
        None
        if position is None
        else {
            int(token): TokenSeen(float(one.logprob), one.rank, one.decoded_token)
            for token, one in position.items()
        }
        for position in positions
    )

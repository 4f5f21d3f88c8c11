"""Outputs of an engine that runs elsewhere, as vLLM's are: the same names, and room for ``.saves``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nnsight_lab.wire.serving import CompletionSeen, OutputSeen, TokenSeen


class RemoteLogprob(NamedTuple):
    """As vLLM's ``Logprob``: natural log probability, rank (1 is the likeliest), the token's text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass
class RemoteCompletion:
    """As vLLM's ``CompletionOutput``."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, RemoteLogprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    saves: Any = None

    def finished(self) -> bool:
        """Whether it has ended (a method, as in vLLM)."""
        return self.finish_reason is not None


@dataclass
class RemoteOutput:
    """As vLLM's ``RequestOutput``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[RemoteCompletion]
    finished: bool
    prompt_logprobs: list[dict[int, RemoteLogprob] | None] | None = None
    metrics: Any = None
    lora_request: Any = None
    saves: Any = None
    error: str | None = None
    num_cached_tokens: int | None = None
    index: int = field(default=0)

    @classmethod
    def of(cls, request_id: str, seen: OutputSeen) -> RemoteOutput:
        """The output that a server told of."""
        prompts = seen.prompt_logprobs
        return cls(
            request_id=request_id,
            prompt=seen.prompt,
            prompt_token_ids=None if seen.prompt_token_ids is None else list(seen.prompt_token_ids),
            outputs=[_completion(one) for one in seen.completions],
            finished=seen.finished,
            prompt_logprobs=None
            if prompts is None
            else [None if one is None else _tokens(one) for one in prompts],
            num_cached_tokens=seen.num_cached_tokens,
            index=seen.place,
        )


def _completion(seen: CompletionSeen) -> RemoteCompletion:
    return RemoteCompletion(
        index=seen.index,
        text=seen.text,
        token_ids=list(seen.token_ids),
        cumulative_logprob=seen.cumulative_logprob,
        logprobs=None if seen.logprobs is None else [_tokens(one) for one in seen.logprobs],
        finish_reason=seen.finish_reason,
        stop_reason=seen.stop_reason,
    )


def _tokens(seen: dict[int, TokenSeen]) -> dict[int, RemoteLogprob]:
    return {token: RemoteLogprob(one.logprob, one.rank, one.text) for token, one in seen.items()}

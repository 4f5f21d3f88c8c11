"""Tiny requests that run the real blocks, to see what they save.

A probe is the call's own request with the first tokens of its longest prompt and a handful of new
tokens. What it saves is measured and dropped; it is no run of anybody's edit and counts as none. The
block does run, on tokens of the user's: side effects in it happen once more for each probe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnsight_lab.engine.call import LabRequest
from nnsight_lab.engine.estimate import Demand, Growths, Sample
from nnsight_lab.engine.prefixes import reading, salted
from nnsight_lab.engine.results import first_error, one_line
from nnsight_lab.engine.sampling import sampling_params
from nnsight_lab.wire.keys import BUDGET_KEY, CONTENT_KEY, REACH_KEY, TRACE_BLOCK, TRACE_KEY
from nnsight_lab.wire.touch import UNKNOWN, Reach

if TYPE_CHECKING:
    from nnsight_lab.engine.edits import EditVersion

#: The longer of the two prompts, at most and at least; the shorter is half of it. Long enough that a
#: block which saves the first ten positions is seen to stop growing, and nothing to any machine.
_LONG_TOKENS = 64
_LEAST_TOKENS = 8
#: New tokens of the probes that see what is saved at every step.
_STEPS = (3, 9)
#: Tokens a tokenizer may add to a text of its own accord.
_SPECIAL_TOKENS = 8


def tokens_bound(prompt: Any) -> int | None:
    """At most how many tokens a prompt has, without a tokenizer; None where one cannot say.

    A tokenizer's smallest piece is a byte, so a text has at most as many tokens as bytes.
    """
    if isinstance(prompt, str):
        return (len(prompt) if prompt.isascii() else len(prompt.encode())) + _SPECIAL_TOKENS
    if not isinstance(prompt, Mapping) or prompt.get("multi_modal_data"):
        return None  # an image becomes as many tokens as its model likes
    if prompt.get("prompt_token_ids") is not None:
        return len(prompt["prompt_token_ids"])
    return tokens_bound(prompt["prompt"]) if isinstance(prompt.get("prompt"), str) else None


def token_ids(prompts: Sequence[Any], tokenizer: Any) -> list[Sequence[int]] | None:
    """The tokens of each prompt; None where one of them is neither text nor tokens."""
    if any(tokens_bound(prompt) is None for prompt in prompts):
        return None
    texts = [_text(prompt) for prompt in prompts]
    given = [text for text in texts if text is not None]
    encoded = iter(tokenizer(given)["input_ids"] if given else ())
    return [
        prompt["prompt_token_ids"] if text is None else next(encoded)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _text(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return prompt
    return prompt["prompt"] if prompt.get("prompt_token_ids") is None else None


def new_tokens(params: Any, prompt_tokens: int, max_tokens: int) -> int:
    """How many tokens a request may generate in a context of ``max_tokens``."""
    room = max(1, max_tokens - prompt_tokens)
    return room if params.max_tokens is None else min(int(params.max_tokens), room)


def demand(request: LabRequest, prompt_tokens: int, max_tokens: int) -> Demand:
    """A request as an estimate needs it."""
    params = request.params
    return Demand(
        prompt_tokens,
        new_tokens(params, prompt_tokens, max_tokens),
        int(params.n),
        (params.extra_args or {}).get(BUDGET_KEY),
    )


@dataclass(eq=False)
class Kind:
    """The requests of a call that run the same blocks, and the probes that stand for them.

    Attributes:
        members: Their places in the call.
        key: What a repeated call is known by.
        probes: By (prompt tokens, new tokens).
        conclusive: Whether every probe is no larger than the largest request it stands for.
    """

    members: list[int]
    key: tuple[Any, ...]
    probes: dict[tuple[int, int], LabRequest]
    conclusive: bool

    def growths(self) -> Growths:
        """What the finished probes say; they are emptied."""
        unknown, over = "", False
        samples = {}
        for at, probe in self.probes.items():
            found = first_error(probe.saves)
            if found is not None and not unknown:
                unknown = f"a probe of {at[0]} tokens failed with {one_line(found[1])}"
                over = self.conclusive and found[1].type_name == "OverBudget"
                unknown = found[1].message if over else unknown
            samples[at] = Sample.of(probe.saves)
            probe.saves = probe.output = None
            probe.parcels = {}  # they hold the memory, and the room that is looked at next would lack it
        return Growths(unknown=unknown, over=over) if unknown else Growths.through(samples)


def kinds(
    requests: Sequence[LabRequest], ids: Sequence[Sequence[int]], demands: Sequence[Demand], max_tokens: int
) -> list[Kind]:
    """The requests with blocks, sorted by what they run.

    Args:
        requests: A call's.
        ids: The tokens of their prompts.
        demands: The same requests, counted.
        max_tokens: The model's context.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, request in enumerate(requests):
        if request.has_blocks:
            steps = min(demands[index].new_tokens, _STEPS[-1])
            run = (request.source, *(version.id for version in request.edits), id(request.lora_request))
            groups.setdefault((steps, *run), []).append(index)
    found = []
    for (steps, *_), members in groups.items():
        longest = max(members, key=lambda index: len(ids[index]))
        first = requests[longest]
        long = min(max(len(ids[longest]), _LEAST_TOKENS), _LONG_TOKENS, max(2, max_tokens - steps))
        short = long // 2
        sizes = [(short, 1), (long, 1)]
        sizes += [(short, new) for new in dict.fromkeys(min(steps, most) for most in _STEPS) if new > 1]
        found.append(
            Kind(
                members,
                (short, long, steps, *_content(first)),
                {size: _probe(first, ids[longest], *size) for size in sizes},
                long <= len(ids[longest]),
            )
        )
    return found


def plain(ids: Sequence[int], prompt_tokens: int, new: int) -> LabRequest:
    """A request without blocks, to see how fast the engine is."""
    params = sampling_params({"max_tokens": new, "temperature": 0, "ignore_eos": True})
    params.skip_reading_prefix_cache = True
    return LabRequest({"prompt_token_ids": _cut(ids, prompt_tokens)}, params)


def _probe(request: LabRequest, ids: Sequence[int], prompt_tokens: int, new: int) -> LabRequest:
    settings = {"max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": request.params.logprobs}
    params = sampling_params(settings)
    params.extra_args = {k: v for k, v in (request.params.extra_args or {}).items() if k != BUDGET_KEY}
    # Its tokens may begin a prompt that others ask: what its blocks write is nobody else's.
    params.extra_args[REACH_KEY] = Reach.PROMPT.value
    reading(params, Reach.PROMPT)
    return LabRequest(
        salted({"prompt_token_ids": _cut(ids, prompt_tokens)}, [UNKNOWN]),
        params,
        edits=request.edits,
        traced=request.traced,
        wants_result=request.wants_result,
        lora_request=request.lora_request,
    )


def _cut(ids: Sequence[int], count: int) -> list[int]:
    """The first ``count`` tokens; of a shorter prompt, over again."""
    return (list(ids[:count]) * (count // max(1, min(len(ids), count)) + 1))[:count]


def _content(request: LabRequest) -> tuple[Any, ...]:
    """What a request's blocks are, the same when a cell is run again."""
    extra = request.params.extra_args or {}
    block = extra.get(CONTENT_KEY) or _digest(extra.get(TRACE_KEY))
    lora = getattr(request.lora_request, "lora_name", None)
    return (block, lora, *(_version(version) for version in request.edits))


def _version(version: EditVersion) -> str:
    # Where the workers do not keep it, a scoped edit is new for every call, and the same block in it.
    return _digest(version.payload) if version.name == TRACE_BLOCK and version.payload else version.id


def _digest(payload: bytes | None) -> str:
    return "" if payload is None else hashlib.blake2b(payload, digest_size=16).hexdigest()

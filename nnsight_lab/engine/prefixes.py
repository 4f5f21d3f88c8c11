"""Which requests share vLLM's prefix cache, and with whom.

vLLM keeps the keys and values of prompts by their tokens, and knows nothing of blocks: what one request wrote
under an edit it would serve to the next one without. It has two words to say more: a request may be told
not to read the cache, and a salt makes what it writes another's for everybody without the same salt. A
request whose blocks touch no row of its prompt is as any other. One whose edits do the same to every row
reads what requests with the very same edits wrote. All others read nothing, and what they write is nobody
else's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from nnsight_lab.errors import RequestRefused
from nnsight_lab.wire.touch import Reach, Touch, together

_SALT = "cache_salt"


def salted(prompt: Any, touches: Iterable[Touch], owner: str = "") -> Any:
    """A prompt as vLLM takes it, kept apart from those that other blocks ran on.

    Args:
        prompt: Text, or one of vLLM's dictionaries; a salt that stands in one is the user's own, and goes on
            keeping apart what it kept apart.
        touches: What its blocks touch, in the order in which they run.
        owner: Whose it is, where users must not learn from the time of an answer what others asked; or "".

    Raises:
        RequestRefused: A salt is no text.
    """
    touches = tuple(touches)
    reach = together(touches)
    given = prompt.get(_SALT) if isinstance(prompt, Mapping) else None
    if given is not None and (not isinstance(given, str) or not given):
        raise RequestRefused(f"{_SALT!r} of a prompt is a text that is not empty, not {given!r:.60}.")
    if reach in (None, Reach.ANSWERS) and not owner:
        return prompt
    if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
        return prompt  # such models have no prefix cache
    parts = [owner.encode(), (given or "").encode()]
    if reach is Reach.PROMPT:
        parts.append(secrets.token_bytes(16))
    elif reach is not None:
        parts += [touch.content for touch in touches if touch.reach is Reach.ROWS]
    salt = sha256()
    for part in parts:
        salt.update(len(part).to_bytes(8, "little") + part)
    made = f"lab-{salt.hexdigest()}"
    if isinstance(prompt, str):
        return {"prompt": prompt, _SALT: made}
    if isinstance(prompt, Mapping):
        return {**prompt, _SALT: made}
    raise RequestRefused(
        f"A prompt is text, token ids or a dictionary of vLLM's, not {type(prompt).__name__}."
    )


def owner_of(user: str, *, alone: bool, shared: bool, code: bool) -> str:
    """Whose a request's part of the cache is; "" for everybody's.

    How soon an answer begins tells whether its prompt was asked before: by default nobody is told that of
    others. Where it is shared, a request with code is not: what the code touches was read by its owner's
    kernel, and others do not rely on that.

    Args:
        user: Whose request.
        alone: Whether there is one user only.
        shared: Whether users share the cache.
        code: Whether a block of code runs in it.
    """
    return "" if alone or (shared and not code) else user


def refuse_long(tokens: int, most: int, reach: Reach | None) -> None:
    """Refuse a prompt that blocks read and that no step takes whole.

    Args:
        tokens: Of the prompt.
        most: Of the longest prompt that runs in one step; 0 for any.
        reach: What its blocks touch.

    Raises:
        RequestRefused: It is longer.
    """
    if reach is not None and reach.whole and 0 < most < tokens:
        raise RequestRefused(
            f"The prompt has {tokens:,} tokens, and blocks read it, so it has to run in one step; this "
            f"engine's steps take {most:,}: start it with max_num_batched_tokens={tokens} or more, or "
            "without that option."
        )


def reading(params: Any, reach: Reach | None) -> None:
    """Have a request read the prefix cache only where its blocks let it.

    Args:
        params: Its ``SamplingParams``, or what stands for them.
        reach: What its blocks touch.
    """
    if reach is Reach.PROMPT:
        params.skip_reading_prefix_cache = True

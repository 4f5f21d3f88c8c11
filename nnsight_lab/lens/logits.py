"""What logits say: the likeliest tokens, how sure they are, and where a given token stands.

Logits over a whole vocabulary are a thousand times what anybody reads of them (a prompt of 100 tokens
through 30 layers of a small model: 590 MB), so they are read a few rows at a time and only what was read
is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

#: How much of the logits is made at once, counted as float32: each product reads the whole unembedding.
CHUNK_BYTES = 64 << 20
#: How much of that is read at once: a CPU reads 64 MiB at a time half as slowly again as 16.
_READ_BYTES = 16 << 20
#: Below this a shifted logit's probability is 0 in float32; also what -inf becomes.
_NEVER = -1.0e4


class Reading(NamedTuple):
    """What was read of rows of logits.

    Attributes:
        ids: The likeliest tokens, best first ``[row, k]``, int64.
        probabilities: Theirs ``[row, k]``, float32.
        entropy: Of the whole distribution, in nats ``[row]``, float32.
        ranks: How many tokens are likelier than each token asked for ``[row, token]``, int64; 0 is the top,
            and -1 says that the logits are no numbers.
        chosen: The probabilities of the tokens asked for ``[row, token]``, float32.
    """

    ids: torch.Tensor
    probabilities: torch.Tensor
    entropy: torch.Tensor
    ranks: torch.Tensor
    chosen: torch.Tensor


def read_logits(logits: torch.Tensor, *, top_k: int = 10, tokens: torch.Tensor | None = None) -> Reading:
    """Read rows of logits; usable in a block: ``lab.lens.read_logits(model.logits)``.

    Args:
        logits: ``[row, vocabulary]``, any float dtype; probabilities are computed in float32.
        top_k: How many of the likeliest tokens.
        tokens: Tokens to look for in each row ``[row, token]``, int64.

    Raises:
        ValueError: When ``top_k`` is below 1 or above the vocabulary.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"top_k={top_k} of a vocabulary of {logits.shape[-1]}")
    if tokens is None:
        tokens = torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    exact = logits.to(torch.float32, copy=True)  # worked on in place below
    wanted = exact.gather(-1, tokens)
    ranks = torch.empty_like(tokens)
    for n in range(tokens.shape[-1]):
        # Summed as int32: as int64 it takes a CPU eight times as long.
        ranks[:, n] = (exact > wanted[:, n : n + 1]).sum(-1, dtype=torch.int32)
    ranks.masked_fill_(wanted.isnan(), -1)  # nothing is greater, and it is not the top for that
    top, ids = exact.topk(top_k, dim=-1)
    peak = top[:, :1]
    shifted = exact.sub_(peak).clamp_(min=_NEVER)
    weights = shifted.exp()
    total = weights.sum(-1, keepdim=True)
    # H = log Z - sum(p * shifted logit)
    entropy = total.log().squeeze(-1) - weights.mul_(shifted).sum(-1) / total.squeeze(-1)
    return Reading(
        ids,
        (top - peak).exp_() / total,
        entropy.clamp_(min=0.0),
        ranks,
        (wanted - peak).exp_() / total,
    )


def read_stream(
    hidden: torch.Tensor,
    unembed: Callable[[torch.Tensor], torch.Tensor],
    *,
    top_k: int = 10,
    tokens: torch.Tensor | None = None,
    vocabulary: int = 0,
) -> Reading:
    """Read many rows of hidden states through an unembedding, a few at a time.

    At most about ``2 * CHUNK_BYTES`` (128 MiB) is alive besides the result, or four rows of logits.

    Args:
        hidden: After the final norm ``[row, hidden]``.
        unembed: ``[row, hidden]`` to ``[row, vocabulary]``.
        top_k: As for `read_logits`.
        tokens: As for `read_logits`.
        vocabulary: How wide the logits will be; found out from one row when 0.
    """
    vocabulary = vocabulary or unembed(hidden[:1]).shape[-1]
    made, at_once = (rows_within(limit, vocabulary) for limit in (CHUNK_BYTES, _READ_BYTES))
    read = []
    for start in range(0, hidden.shape[0], made):
        logits = unembed(hidden[start : start + made])
        for at in range(0, logits.shape[0], at_once):
            part = None if tokens is None else tokens[start + at : start + at + at_once][: made - at]
            read.append(read_logits(logits[at : at + at_once], top_k=top_k, tokens=part))
    return Reading(*(torch.cat(parts) for parts in zip(*read, strict=True)))


def likeliest(
    hidden: torch.Tensor, unembed: Callable[[torch.Tensor], torch.Tensor], vocabulary: int
) -> torch.Tensor:
    """The likeliest token of each row of hidden states ``[row, hidden]``: ``[row]``, int64."""
    rows = rows_within(CHUNK_BYTES, vocabulary)
    parts = [unembed(hidden[at : at + rows]).argmax(-1) for at in range(0, hidden.shape[0], rows)]
    return torch.cat(parts)


def rows_within(limit_bytes: int, width: int) -> int:
    """How many float32 rows of that width fit; one at the least."""
    return max(1, limit_bytes // (4 * width))

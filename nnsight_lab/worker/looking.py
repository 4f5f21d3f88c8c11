"""The logit lens and attention patterns, where the model is: what their blocks call in the worker.

Each is an ordinary function of a block: it reads envoys in the order the model computes them and returns
tensors. Norm and unembedding are the model's own modules, called the way the model calls them, with
nnsight stood down, so that the calls serve no block and count as no visit. And each checks itself on the
request it runs for, because an architecture may do more than its modules show: the last layer's lens must
give the model's logits, a pattern times the values must give the attention's output.

The worker does one thing at a time, and a whole vocabulary for every layer and position takes a CPU a
minute. So a request's block only keeps what is to be read (streams through the norm, queries and keys), under
a key of the engine's, and the reading goes in messages of a fraction of a second, between which the worker
serves others and an interrupt needs nothing undone but the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch

from nnsight_lab.errors import LensRefused
from nnsight_lab.lens.anatomy import AttentionForm, attention_form
from nnsight_lab.lens.logits import likeliest, read_stream
from nnsight_lab.lens.pattern import attention_pattern
from nnsight_lab.lens.residual import residual

#: How far two ways of computing one value may be apart, as a share of its largest entry: float32 sums in
#: another order came to 1e-6, bfloat16 rounds at 4e-3 several times over. What is wrong is off by about 1.
_APART = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.06}
_APART_QUANTISED = 0.2


class _Streams(NamedTuple):
    """For each layer ``[position, hidden]`` through the final norm, and the model's last layer."""

    normed: list[torch.Tensor]
    last: torch.Tensor


class _Heads(NamedTuple):
    """A layer's queries ``[token, head, dim]`` and keys ``[token, kv_head, dim]``, and what else counts."""

    query: torch.Tensor
    key: torch.Tensor
    form: AttentionForm


#: What requests kept to be read, until the engine says that it was.
_KEPT: dict[str, _Streams | list[_Heads]] = {}


def piece(
    model: Any,
    *,
    key: str = "",
    drop: list[str] | None = None,
    stream: torch.Tensor | None = None,
    **asked: Any,
) -> dict[str, torch.Tensor]:
    """A part of a look that takes a fraction of a second.

    Args:
        model: The root envoy.
        key: Of what a request kept.
        drop: Keys of which no more is read; then nothing else is asked.
        stream: A saved stream instead of a key, with the other arguments of `lens_of_stream`.
        **asked: Of a lens ``first`` and ``last`` (positions), ``top_k`` and ``target``; of attention
            ``layers`` (places among those kept), ``heads``, ``queries`` and ``dtype``.

    Returns:
        As `lens_of_hidden`; of attention ``patterns`` ``[layer, head, query, key]``.
    """
    for name in drop or ():
        _KEPT.pop(name, None)
    if drop is not None:
        return {"kept": torch.tensor(len(_KEPT))}
    if stream is not None:
        return lens_of_stream(model, stream, **asked)
    kept = _KEPT.get(key)
    if kept is None:
        raise LensRefused("the worker does not have it any more; ask again")
    if isinstance(kept, _Streams):
        part = slice(asked["first"], asked["last"])
        normed = [hidden[part] for hidden in kept.normed]
        return lens_of_hidden(model, normed, kept.last[part], top_k=asked["top_k"], target=asked["target"])
    dtype = getattr(torch, asked["dtype"])
    found = [
        _pattern(layer.query, layer.key, layer.form, asked["heads"], asked["queries"], dtype)
        for layer in (kept[at] for at in asked["layers"])
    ]
    return {"patterns": torch.stack(found)}


def lens_of_request(
    model: Any,
    *,
    layers: str,
    norm: str,
    count: int,
    tokens: int,
    wanted: list[int],
    positions: list[int],
    key: str,
    check: bool,
) -> None:
    """Keep the streams of the request whose block calls this, through the final norm.

    Args:
        model: The root envoy.
        layers: The path of the decoder layers.
        norm: The path of the final norm.
        count: How many layers there are.
        tokens: How long the prompt is.
        wanted: Which of them, ascending.
        positions: Which tokens of the prompt.
        key: What they are kept under, for `piece`.
        check: Whether to compare with the model's logits; not where an edit may have changed them.

    Raises:
        LensRefused: When the last layer's lens is not what the model says.
    """
    decoder, final = _at(model, layers), _at(model, norm)
    rows = torch.tensor([*positions, -1])  # the last token's is compared with the model's logits
    normed: list[torch.Tensor] = []
    for number in sorted({*wanted, count - 1}):
        output = decoder[number].output
        _whole(residual(output).shape[0], tokens)
        normed.append(_normed(final, output, rows))
    last = normed[-1]
    if check:
        _agrees(_unembed(model, last[-1:]), model.logits[-1:], last.dtype, "the model's own logits", "lens")
    _KEPT[key] = _Streams([hidden[:-1] for hidden in normed[: len(wanted)]], last[:-1])


def lens_of_stream(
    model: Any, stream: torch.Tensor, *, norm: str, final: int | None, top_k: int, target: int | None
) -> dict[str, torch.Tensor]:
    """The lens of a residual stream that was saved: outside of any request.

    Args:
        model: The root envoy.
        stream: ``[layer, position, hidden]``, any float dtype.
        norm: The path of the final norm.
        final: Which row is the model's last layer; None where none is.
        top_k: How many of the likeliest tokens.
        target: A token to look for.

    Returns:
        As `lens_of_hidden`.
    """
    module = _at(model, norm)
    like = next(model._module.parameters())
    streams = stream.to(device=like.device, dtype=_dtype_of(module, like))
    normed = [_first(module(one)) for one in streams]
    return lens_of_hidden(model, normed, None if final is None else normed[final], top_k=top_k, target=target)


def lens_of_hidden(
    model: Any,
    normed: list[torch.Tensor],
    last: torch.Tensor | None,
    *,
    top_k: int,
    target: int | None,
) -> dict[str, torch.Tensor]:
    """Read streams that have been through the final norm.

    Args:
        model: The root envoy.
        normed: For each layer ``[position, hidden]``.
        last: The last layer's, where it is known.
        top_k: How many of the likeliest tokens.
        target: A token to look for.

    Returns:
        ``ids`` (int32) and ``probabilities`` ``[layer, position, k]``, ``entropy`` ``[layer, position]``,
        ``final_ids`` ``[position]`` where ``last`` is given, and ``ranks`` (int32) and ``chosen``
        ``[layer, position, token]`` of the final token, then the target, as far as they are there.
    """

    def unembed(hidden: torch.Tensor) -> torch.Tensor:
        return _unembed(model, hidden)

    layers, positions = len(normed), normed[0].shape[0]
    device = normed[0].device
    vocabulary = unembed(normed[0][:1]).shape[-1]
    tokens: list[torch.Tensor] = []
    found: dict[str, torch.Tensor] = {}
    if last is not None:
        found["final_ids"] = likeliest(last, unembed, vocabulary)
        tokens.append(found["final_ids"])
    if target is not None:
        tokens.append(torch.full((positions,), target, dtype=torch.int64, device=device))
    asked = torch.stack(tokens, dim=-1).repeat(layers, 1) if tokens else None
    hidden = torch.cat(normed)
    reading = read_stream(hidden, unembed, top_k=top_k, tokens=asked, vocabulary=vocabulary)
    found |= {
        "ids": reading.ids.int(),
        "probabilities": reading.probabilities,
        "entropy": reading.entropy,
        "ranks": reading.ranks.int(),
        "chosen": reading.chosen,
    }
    by_row = [name for name in found if name != "final_ids"]
    found |= {name: found[name].reshape(layers, positions, *found[name].shape[1:]) for name in by_row}
    return found


def attention_of_request(
    model: Any,
    *,
    layers: str,
    tokens: int,
    wanted: list[int],
    key: str,
    check: bool,
) -> None:
    """Keep the queries and keys of the request whose block calls this.

    Args:
        model: The root envoy.
        layers: The path of the decoder layers.
        tokens: How long the prompt is.
        wanted: Which of them, ascending.
        key: What they are kept under, for `piece`.
        check: Whether to compare with the attention's output; not where an edit may have changed it.

    Raises:
        LensRefused: When a layer's attention is more than its queries and keys, or does not give the
            output that the model computed.
    """
    decoder = _at(model, layers)
    kept = []
    for number in wanted:
        form = attention_form(decoder[number]._module)
        attention = _at(decoder[number], form.path)
        args, named = attention.inputs
        asks, offers, value = (*args, *(named[n] for n in ("query", "key", "value") if n in named))[:3]
        # Copies: the model's own buffers are written over by the next layer.
        form = _of_all_heads(form, asks, offers)
        asks = asks.reshape(-1, form.heads, form.head_size).clone()
        offers = offers.reshape(-1, form.kv_heads, form.head_size).clone()
        _whole(offers.shape[0], tokens)
        kept.append(_Heads(asks, offers, form))
        if check:
            value = value.reshape(offers.shape[0], form.kv_heads, -1)
            _gives(asks, offers, value, form, attention, f"layer {number}'s attention")
    _KEPT[key] = kept


def _of_all_heads(form: AttentionForm, query: torch.Tensor, key: torch.Tensor) -> AttentionForm:
    """The form of the whole attention: a tensor-parallel rank's module knows of its own heads only."""
    heads = query.shape[1:].numel() // form.head_size
    kv_heads = key.shape[1:].numel() // form.head_size
    if form.sinks is not None and form.sinks.numel() != heads:
        raise LensRefused("its heads' sinks are spread over tensor-parallel ranks")
    return form._replace(heads=heads, kv_heads=kv_heads)


def _pattern(
    query: torch.Tensor,
    key: torch.Tensor,
    form: AttentionForm,
    heads: list[int] | None,
    queries: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return attention_pattern(
        query,
        key,
        scale=form.scale,
        window=form.window,
        soft_cap=form.soft_cap,
        sinks=form.sinks,
        heads=heads,
        queries=queries,
        dtype=dtype,
    )


def _gives(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    form: AttentionForm,
    attention: Any,
    what: str,
) -> None:
    """Whether the last token's pattern times the values is what the model's own kernel computed."""
    row = _pattern(query, key, form, None, [key.shape[0] - 1], torch.float32)  # [head, 1, key]
    values = value.float().repeat_interleave(form.heads // form.kv_heads, dim=1).transpose(0, 1)
    mine = (row @ values).reshape(1, -1)
    quantised = "fp8" in str(getattr(attention._module, "kv_cache_dtype", ""))
    apart = _APART_QUANTISED if quantised else 0.0
    output = attention.output[-1:].reshape(1, -1)
    _agrees(mine, output, query.dtype, f"what {what} computed", "pattern", apart)


def _whole(rows: int, tokens: int) -> None:
    if rows != tokens:
        raise LensRefused(
            f"only {rows} of the prompt's {tokens} tokens ran through the model; the others were cached"
        )


def _agrees(
    mine: torch.Tensor, models: torch.Tensor, dtype: torch.dtype, what: str, name: str, apart: float = 0.0
) -> None:
    mine, models = mine.float(), models.float()
    allowed = max(apart, _APART.get(dtype, _APART_QUANTISED))
    same = mine.shape == models.shape
    off = (
        float((mine - models).abs().nan_to_num().max() / models.abs().max().clamp(min=1e-6)) if same else 0.0
    )
    if not same or off > allowed:
        seen = f"off by {off:.0%} of its largest value" if same else f"{tuple(mine.shape)}"
        raise LensRefused(f"the {name} does not give {what} on this model ({seen}), so it would be wrong")


# -- the model's own modules ---------------------------------------------------------------------


def _at(envoy: Any, path: str) -> Any:
    envoy._module.get_submodule(path)  # a module's path, and no other way through attributes
    return reduce(getattr, path.split("."), envoy)


def _normed(norm: Any, output: Any, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a layer's output through the final norm, in the form in which the model itself would.

    A fused layer's pair goes in as a pair: the norm adds it, as after the last layer.
    """
    if isinstance(output, tuple) and len(output) > 1 and output[1] is not None:
        hidden, stream = (part[rows.to(part.device)] for part in output[:2])
        return _first(norm(hidden, stream))  # rows are copies: norms write where they read
    stream = residual(output)
    return _first(norm(stream[rows.to(stream.device)]))


def _first(normed: Any) -> torch.Tensor:
    value: torch.Tensor = normed[0] if isinstance(normed, tuple) else normed
    return value


def _unembed(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """``[row, hidden]`` to ``[row, vocabulary]`` as the model does: head, scale, soft cap, no padding."""
    with _stood_down(model):
        logits: torch.Tensor | None = model._module.compute_logits(hidden)
    if logits is None:
        raise LensRefused("the model's logits are gathered on another rank")
    return logits


@contextmanager
def _stood_down(model: Any) -> Iterator[None]:
    """Serve no block meanwhile, as nnsight does where a block calls a module."""
    interleaver = model.interleaver
    interleaving, interleaver.interleaving = interleaver.interleaving, False
    try:
        yield
    finally:
        interleaver.interleaving = interleaving


def _dtype_of(norm: Any, like: torch.Tensor) -> torch.dtype:
    weight = getattr(norm._module, "weight", None)
    return weight.dtype if isinstance(weight, torch.Tensor) else like.dtype

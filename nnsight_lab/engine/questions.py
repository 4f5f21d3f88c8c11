"""A question to a lens: checked against the model before anything runs, and its answer put together.

Counts come from the model's configuration and from the tree without weights in this process; a mistake is
one line that says what there is.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.engine.pieces import Pieces
from nnsight_lab.engine.sampling import prompt_list
from nnsight_lab.errors import LensRefused, RequestRefused
from nnsight_lab.lens.anatomy import anatomy, attention_form
from nnsight_lab.lens.attention import Attention
from nnsight_lab.lens.logit_lens import LogitLens
from nnsight_lab.saves.budget import size_of

if TYPE_CHECKING:
    from nnsight_lab.engine.service import EngineService

T = TypeVar("T")
#: Messages to the workers, each answered with what `nnsight_lab.worker.looking.piece` found.
Messages = Generator[dict[str, Any], dict[str, Any], T]
#: Told the share of a look that is done, 0 to 1.
Progress = Callable[[float], None]

# Functions of the worker's own, imported there: nothing of this package travels with a block.


class Asked(NamedTuple):
    """A question as it goes to the worker with one prompt.

    Attributes:
        block: What runs there.
        held_bytes: What it keeps in the worker until it was read.
        key: What it is kept under.
    """

    block: Block
    held_bytes: int
    key: str


class Question(Generic[T]):
    """What every look at a model has: prompts, layers, and what is known of the model.

    Attributes:
        prompts: Token ids of each.
        several: Whether the caller gave a list of prompts.
        layers: Layer numbers, in the caller's order.
    """

    def __init__(self, engine: EngineService, prompts: Sequence[Any], layers: Any) -> None:
        self.facts = engine.facts()
        self.engine = engine
        self.count = self.facts.layers
        self.anatomy = anatomy(engine.model._module, self.count)
        self.layers = chosen(layers, self.count, "layer", f"the model has {_many(self.count, 'layer')}")
        listed, self.several = prompt_list(prompts)
        self.prompts = [self._ids(prompt) for prompt in listed]

    def asked(self, index: int, *, check: bool) -> Asked:
        """The block that asks this of a prompt."""
        raise NotImplementedError

    @property
    def units(self) -> int:
        """How much there is to read, as `read` counts it."""
        raise NotImplementedError

    def pieces(self, most_bytes: int, progress: Progress | None) -> Pieces:
        """How much of it to ask for at once.

        Args:
            most_bytes: Of one message.
            progress: Told the share that is done.
        """
        raise NotImplementedError

    def read(self, index: int, key: str, pieces: Pieces) -> Messages[T]:
        """The result of a prompt, from what its request kept under a key."""
        raise NotImplementedError

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each token; of one that is part of a character, the vocabulary's own word for it."""
        tokenizer = self.engine.tokenizer
        wanted = sorted(set(ids))
        known = [i for i in wanted if i < len(tokenizer)]  # a model's vocabulary may be padded past that
        texts = dict.fromkeys(wanted, "")
        texts.update(zip(known, tokenizer.batch_decode([[i] for i in known]), strict=True))
        broken = [i for i, text in texts.items() if "\ufffd" in text]
        texts.update(zip(broken, map(str, tokenizer.convert_ids_to_tokens(broken)), strict=True))
        return texts

    def _ids(self, given: Any) -> list[int]:
        """A prompt's tokens, as vLLM would have them: how many there are is asked before it runs."""
        prompt = given
        if isinstance(given, Mapping):
            if given.get("multi_modal_data"):
                raise RequestRefused(
                    "A lens takes text or token ids: of other data the tokens are not known."
                )
            keys = [key for key in ("prompt_token_ids", "input_ids", "prompt") if key in given]
            prompt = given[keys[0]] if keys else ""
            if isinstance(prompt, torch.Tensor):
                prompt = prompt.tolist()
            if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
                prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = self.engine.tokenizer(prompt).input_ids
        if not isinstance(prompt, list | tuple) or not prompt:
            raise RequestRefused("The prompt is empty: a lens needs a token to look at.")
        return list(prompt)

    def _model_order(self) -> list[int]:
        """For each layer in the model's order, its place in the caller's."""
        return [self.layers.index(layer) for layer in sorted(self.layers)]

    def _layered(self, values: torch.Tensor) -> torch.Tensor:
        """``[layer, …]`` in the caller's order; the worker reads layers in the model's."""
        order = sorted(self.layers)
        if list(self.layers) == order:
            return values
        return values[[order.index(layer) for layer in self.layers]]


class LensQuestion(Question[LogitLens]):
    """A logit lens that somebody asked for."""

    def __init__(
        self,
        engine: EngineService,
        prompts: Sequence[Any],
        *,
        residual: Any,
        layers: Any,
        top_k: int,
        positions: Any,
        target: Any,
    ) -> None:
        super().__init__(engine, prompts, layers)
        self.vocabulary = self.facts.vocabulary
        self.hidden = self.facts.hidden
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= self.vocabulary:
            raise RequestRefused(f"top_k={top_k!r} is not between 1 and the vocabulary's {self.vocabulary}.")
        self.top_k = top_k
        self.stream: torch.Tensor | None = None
        lengths = [len(ids) for ids in self.prompts]
        if residual is not None:
            self.stream = self._stream(residual, layers, named=layers != "all")
            lengths = [self.stream.shape[1]]
        self.positions = [
            chosen(positions, n, "position", f"prompt {i} has {_many(n, 'token')}")
            for i, n in enumerate(lengths)
        ]
        if self.stream is not None and positions != "all":
            self.stream = self.stream[:, list(self.positions[0])]
        self.targets = self._targets(target, len(lengths))

    # -- of a prompt ---------------------------------------------------------------------------

    def asked(self, index: int, *, check: bool) -> Asked:
        positions = self.positions[index]
        asked = {
            "layers": self.anatomy.layers,
            "norm": self.anatomy.norm,
            "count": self.count,
            "tokens": len(self.prompts[index]),
            "wanted": sorted(self.layers),
            "positions": list(positions),
            "key": (key := uuid.uuid4().hex),
            "check": check,
        }
        held = (len(self.layers) + 1) * (len(positions) + 1) * self.hidden * self.facts.itemsize
        return Asked(DeclaredBlock.of("lens", asked), held, key)

    @property
    def units(self) -> int:
        """Rows: a layer at a position each."""
        return len(self.layers) * sum(map(len, self.positions))

    def pieces(self, most_bytes: int, progress: Progress | None) -> Pieces:
        """A row is a product with the whole unembedding; a stream's goes to the worker as well."""
        carried = 8 * self.top_k + 32
        if self.stream is not None:
            carried = max(carried, self.hidden * self.stream.element_size())
        return Pieces(
            flops=2.0 * self.hidden * self.vocabulary,
            most=most_bytes // carried,
            total=self.units,
            progress=progress,
        )

    def read(self, index: int, key: str, pieces: Pieces) -> Messages[LogitLens]:
        target = {"top_k": self.top_k, "target": self.targets[index]}
        found = yield from self._read(
            index, pieces, lambda first, last: {"key": key, "first": first, "last": last, **target}
        )
        return self.answer(index, found)

    def read_stream(self, stream: torch.Tensor, pieces: Pieces) -> Messages[LogitLens]:
        """The lens of a saved stream."""
        asked = self.of_stream()
        found = yield from self._read(
            0, pieces, lambda first, last: {**asked, "stream": stream[:, first:last].contiguous()}
        )
        return self.answer_of_stream(found)

    def _read(
        self, index: int, pieces: Pieces, message: Callable[[int, int], dict[str, Any]]
    ) -> Messages[dict[str, torch.Tensor]]:
        """Some positions at a time."""
        layers, count = len(self.layers), len(self.positions[index])
        parts: list[dict[str, torch.Tensor]] = []
        at = 0
        while at < count:
            last = min(count, at + max(1, pieces.units // layers))
            found = yield message(at, last)
            pieces.took((last - at) * layers, found.pop("seconds"))
            parts.append(found)
            at = last
        # Everything has positions as its second axis, but for the final ids, which have only them.
        return {
            name: torch.cat([part[name] for part in parts], dim=0 if name == "final_ids" else 1)
            for name in parts[0]
        }

    def answer(self, index: int, found: Mapping[str, torch.Tensor]) -> LogitLens:
        ids = self.prompts[index] if self.prompts else []
        final, target = found.get("final_ids"), self.targets[index]
        top_ids = self._layered(found["ids"].long())
        shown = {*ids, *top_ids.flatten().tolist(), *(() if final is None else final.tolist())}
        texts = self.texts(shown if target is None else {*shown, target})
        ranks, likely = self._layered(found["ranks"].long()), self._layered(found["chosen"])
        at = 0 if final is None else 1
        return LogitLens(
            layers=self.layers,
            positions=self.positions[index],
            token_ids=tuple(ids),
            tokens=tuple(texts[i] for i in ids),
            top_ids=top_ids,
            top_probabilities=self._layered(found["probabilities"]),
            entropy=self._layered(found["entropy"]),
            final_ids=final,
            final_ranks=None if final is None else ranks[..., 0],
            final_probabilities=None if final is None else likely[..., 0],
            target_id=target,
            target_ranks=None if target is None else ranks[..., at],
            target_probabilities=None if target is None else likely[..., at],
            texts=texts,
        )

    # -- of a stream ---------------------------------------------------------------------------

    def of_stream(self) -> dict[str, Any]:
        """What the worker is told beside the stream."""
        return {
            "norm": self.anatomy.norm,
            "final": self.layers.index(self.count - 1) if self.count - 1 in self.layers else None,
            "top_k": self.top_k,
            "target": self.targets[0],
        }

    def answer_of_stream(self, found: Mapping[str, torch.Tensor]) -> LogitLens:
        """The result; a stream's layers come in its own order."""
        order = torch.tensor(self.layers).argsort()
        by_layer = {name: value if name == "final_ids" else value[order] for name, value in found.items()}
        return self.answer(0, by_layer)

    def _stream(self, residual: Any, layers: Any, *, named: bool) -> torch.Tensor:
        """``[layer, token, hidden]``, with `layers` and `prompts` made to fit it."""
        try:
            parts = [torch.as_tensor(p) for p in residual] if isinstance(residual, list | tuple) else None
            stream = torch.as_tensor(residual) if parts is None else torch.stack(parts)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestRefused(
                f"residual is not a stream ({str(error).splitlines()[0]}); expected [layer, token, hidden], "
                "a list of [token, hidden], or one."
            ) from None
        if stream.ndim == 2:
            stream = stream[None]
        if stream.ndim != 3 or not stream.is_floating_point() or 0 in stream.shape[:2]:
            raise RequestRefused(
                f"residual is {tuple(stream.shape)} of {str(stream.dtype).removeprefix('torch.')}; expected "
                "[layer, token, hidden], a list of [token, hidden], or one."
            )
        if stream.shape[-1] != self.hidden:
            raise RequestRefused(
                f"residual has a width of {stream.shape[-1]}; this model's streams are {self.hidden} wide."
            )
        if not named:
            self.layers = tuple(range(len(stream)))
            if len(stream) > self.count:
                raise RequestRefused(
                    f"residual has {_many(len(stream), 'layer')}; the model has {self.count}."
                )
        elif len(self.layers) != len(stream):
            raise RequestRefused(
                f"layers names {_many(len(self.layers), 'layer')}; residual has {len(stream)}."
            )
        if len(self.prompts) > 1:
            raise RequestRefused("One prompt, or none, goes with a residual stream.")
        if self.prompts and len(self.prompts[0]) != stream.shape[1]:
            raise RequestRefused(
                f"The prompt has {_many(len(self.prompts[0]), 'token')}; residual has {stream.shape[1]}."
            )
        return stream.detach().cpu()

    # -- its target ----------------------------------------------------------------------------

    def _targets(self, target: Any, count: int) -> list[int | None]:
        if isinstance(target, list | tuple):
            if len(target) != count:
                raise RequestRefused(
                    f"target lists {_many(len(target), 'token')} for {_many(count, 'prompt')}."
                )
            return [self._target(one) for one in target]
        return [self._target(target)] * count

    def _target(self, target: Any) -> int | None:
        if target is None:
            return None
        if isinstance(target, str):
            ids = self.engine.tokenizer(target, add_special_tokens=False).input_ids
            if len(ids) != 1:
                parts = ", ".join(repr(self.texts([i])[i]) for i in ids[:8])
                raise RequestRefused(
                    f"target={target!r} is {len(ids)} tokens ({parts}): give one token, or its id."
                )
            return int(ids[0])
        try:
            found = operator.index(target)
        except TypeError:
            raise RequestRefused(f"target={target!r} is neither a token's text nor its id.") from None
        if not 0 <= found < self.vocabulary:
            raise RequestRefused(f"target={found} is not a token: the vocabulary has {self.vocabulary}.")
        return found


class AttentionQuestion(Question[Attention]):
    """Attention patterns that somebody asked for."""

    def __init__(
        self,
        engine: EngineService,
        prompts: Sequence[Any],
        *,
        layers: Any,
        heads: Any,
        queries: Any,
        dtype: str,
        max_bytes: int | str,
    ) -> None:
        super().__init__(engine, prompts, layers)
        if self.facts.pipeline_parallel > 1:
            raise LensRefused(
                "Attention patterns need all layers in one place, and this engine has pipeline stages."
            )
        if self.facts.tensor_parallel > 1:
            raise LensRefused(
                "Attention patterns need all heads in one place, and this engine's are spread over "
                "tensor-parallel ranks."
            )
        if dtype not in ("float32", "float16"):
            raise RequestRefused(f'dtype={dtype!r} is neither "float32" nor "float16".')
        self.dtype = dtype
        count, self._kept_bytes = self._heads()
        self.heads = chosen(heads, count, "head", f"the model has {_many(count, 'head')}")
        self.queries = [
            chosen(queries, len(ids), "query", f"prompt {i} has {_many(len(ids), 'token')}")
            for i, ids in enumerate(self.prompts)
        ]
        allowed = size_of(max_bytes, name="max_bytes")
        total = sum(self._bytes(index) for index in range(len(self.prompts)))
        if total > allowed:
            raise RequestRefused(
                f"These patterns would be {total:,} bytes ({_many(len(self.layers), 'layer')} x "
                f"{_many(len(self.heads), 'head')} x queries x tokens); max_bytes is {allowed:,}. "
                'Ask for fewer layers, heads or queries, or dtype="float16".'
            )

    def _heads(self) -> tuple[int, int]:
        """How many query heads the chosen layers have, and the bytes of a token's queries and keys in all."""
        layers = self.engine.model._module.get_submodule(self.anatomy.layers)
        counts: dict[int, int] = {}
        kept = 0
        for number in self.layers:
            try:
                form = attention_form(layers[number])
                counts[form.heads] = number
                kept += (form.heads + form.kv_heads) * form.head_size * self.facts.itemsize
            except LensRefused as refused:
                raise LensRefused(f"Layer {number} has no pattern that would be right: {refused}.") from None
        if len(counts) > 1:
            kinds = ", ".join(f"{heads} (layer {number})" for heads, number in counts.items())
            raise RequestRefused(f"These layers have different numbers of heads: {kinds}. Ask for one kind.")
        return next(iter(counts)), kept

    def _bytes(self, index: int) -> int:
        each = 4 if self.dtype == "float32" else 2
        tokens = len(self.prompts[index])
        return len(self.layers) * len(self.heads) * len(self.queries[index]) * tokens * each

    def asked(self, index: int, *, check: bool) -> Asked:
        asked = {
            "layers": self.anatomy.layers,
            "tokens": len(self.prompts[index]),
            "wanted": sorted(self.layers),
            "key": (key := uuid.uuid4().hex),
            "check": check,
        }
        block = DeclaredBlock.of("attention", asked)
        return Asked(block, self._kept_bytes * len(self.prompts[index]), key)

    @property
    def units(self) -> int:
        """Numbers of all patterns."""
        each = 4 if self.dtype == "float32" else 2
        return sum(self._bytes(index) for index in range(len(self.prompts))) // each

    def pieces(self, most_bytes: int, progress: Progress | None) -> Pieces:
        """A number is a product of two heads' widths, about, and what its softmax costs."""
        size = self.facts.head_size
        most = most_bytes // (4 if self.dtype == "float32" else 2)
        return Pieces(flops=2.0 * size + 200, most=most, total=self.units, progress=progress)

    def read(self, index: int, key: str, pieces: Pieces) -> Messages[Attention]:
        """Whole layers at a time where they are small, else some heads of one, else some queries of one."""
        heads, queries, keys = self.heads, self.queries[index], len(self.prompts[index])
        of_head = len(queries) * keys
        shape = (len(self.layers), len(heads), len(queries), keys)
        patterns = torch.empty(shape, dtype=getattr(torch, self.dtype))
        rows = torch.tensor(self._model_order())
        layer = head = query = 0
        while layer < len(self.layers):
            deep = max(1, pieces.units // (of_head * len(heads))) if not head and not query else 1
            layers = slice(layer, min(layer + deep, len(self.layers)))
            wide = 1 if query else max(1, pieces.units // of_head)
            some = slice(head, min(head + wide, len(heads)))
            long = max(1, pieces.units // keys) if some.stop - some.start == 1 else len(queries)
            asks = slice(query, min(query + long, len(queries)))
            found = yield {
                "key": key,
                "layers": list(range(layers.start, layers.stop)),
                "heads": list(heads[some]),
                "queries": list(queries[asks]),
                "dtype": self.dtype,
            }
            part = found["patterns"]
            patterns[rows[layers], some, asks] = part
            pieces.took(part.numel(), found["seconds"])
            query = asks.stop % len(queries)
            head = head if query else some.stop % len(heads)
            layer = layer if query or head else layers.stop
        return self._attention(index, patterns)

    def _attention(self, index: int, patterns: torch.Tensor) -> Attention:
        ids = self.prompts[index]
        texts = self.texts(ids)
        return Attention(
            patterns=patterns,
            layers=self.layers,
            heads=self.heads,
            queries=self.queries[index],
            token_ids=tuple(ids),
            tokens=tuple(texts[i] for i in ids),
        )


def chosen(given: Any, count: int, what: str, there: str) -> tuple[int, ...]:
    """Numbers below ``count`` from ``"all"``, ``"last"``, a number, numbers, or a slice.

    Negative ones count from the end.

    Raises:
        RequestRefused: For one that is not there, none, or one twice.
    """
    if isinstance(given, str):
        if given == "all":
            return tuple(range(count))
        if given != "last":
            raise RequestRefused(f'{_plural(what)}: {given!r} is neither "all", "last" nor numbers.')
        given = -1
    if isinstance(given, slice):
        given = range(count)[given]
    listed = given if isinstance(given, Iterable) else [given]
    numbers = []
    for item in listed:
        try:
            number = operator.index(_no_flag(item))
        except TypeError:
            raise RequestRefused(f"{item!r} is not the number of a {what}.") from None
        if not -count <= number < count:
            raise RequestRefused(f"There is no {what} {number}: {there}.")
        numbers.append(number % count)
    if not numbers:
        raise RequestRefused(f"No {what} was asked for: {there}.")
    if len(set(numbers)) < len(numbers):
        raise RequestRefused(f"A {what} was asked for twice: {numbers}.")
    return tuple(numbers)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {_plural(noun)}"


def _plural(noun: str) -> str:
    return "queries" if noun == "query" else f"{noun}s"


def _no_flag(item: Any) -> Any:
    """A number; True is none, though Python counts with it."""
    return None if isinstance(item, bool) else item

"""Logit lenses and attention patterns of an engine: what is asked, in how many calls, what comes home.

The arithmetic runs in the worker, beside the weights (`nnsight_lab.worker.looking`); vocabulary-sized arrays
never leave it. Everything that can be wrong with a question is said here, in one line, before a request is
submitted.

Each look is written once, as a generator of steps (a call to run, or a message to the workers), which a sync
and an async method drive alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch

from nnsight_lab.engine.call import Call
from nnsight_lab.engine.questions import (
    Asked,
    AttentionQuestion,
    LensQuestion,
    Messages,
    Progress,
    Question,
)
from nnsight_lab.engine.ranks import told_first
from nnsight_lab.engine.service import EngineService
from nnsight_lab.engine.waiting import INTERRUPTED
from nnsight_lab.errors import BlockError, Interrupted, LensRefused, RequestRefused, nearest
from nnsight_lab.lens.attention import Attention
from nnsight_lab.lens.logit_lens import LogitLens
from nnsight_lab.lens.shown import Several
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import LOOK

T = TypeVar("T")
#: A call to run, or an answer of the workers to wait for.
Step = Call | Future[list[Any]]
Steps = Generator[Step, Any, T]

#: What the requests of one call may keep in the worker until they were read.
_WAVE_BYTES = 512 << 20
#: How much goes to the worker or comes from it in one message: the engine does nothing else meanwhile.
_MESSAGE_BYTES = 8 << 20
_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}


class Looking(EngineService):
    """An engine, as what looks into it sees it."""

    def logit_lens(
        self,
        *prompts: Any,
        residual: Any = None,
        layers: Any = "all",
        top_k: int = 10,
        positions: Any = "all",
        target: Any = None,
        edits: Sequence[str] | None = None,
        progress: Progress | None = None,
        **unknown: Any,
    ) -> Any:
        """What each layer would say next: its residual stream through the final norm and unembedding.

        The logit lens is nostalgebraist's ("interpreting GPT: the logit lens", LessWrong, 2020). Norm and
        unembedding are the model's own, run in the worker, so the last layer's lens is what the model
        says; that is checked on every prompt (unless edits run). Only the top tokens, entropies and ranks
        come home. Besides the streams of the requests under way (512 MiB at the most, else they go in
        several calls), the worker holds about 128 MiB of logits at a time.

        Args:
            *prompts: As for `LocalEngine.trace`, text or token ids; or none, with ``residual``, which may
                also stand here.
            residual: A saved residual stream to read instead, as `nnsight_lab.residual` gives it:
                ``[layer, token, hidden]``, a list of ``[token, hidden]``, or one ``[token, hidden]``, in
                any float dtype (the worker uses the model's). A prompt beside it only names the tokens.
                ``layers`` then says which layers it holds; all of them, or ``0, 1, …``, when not given.
            layers: ``"all"``, ``"last"``, a number, or numbers; negative ones count from the last.
            top_k: How many tokens for each layer and position.
            positions: ``"all"``, ``"last"``, a place in the prompt, or places; negative ones count from
                the end.
            target: A token to follow: its id, or text that is exactly one token (`" Paris"`); a list
                gives each of several prompts its own.
            edits: As for `LocalEngine.trace`.
            progress: Called with the share that is done, 0 to 1, after each piece of a long look.
            **unknown: Refused, with the nearest name there is.

        Returns:
            `LogitLens`; a list in prompt order where several prompts were given.

        Raises:
            LensRefused: Where the lens would not be right on this model, and why.
            RequestRefused: When what is asked for does not exist: a layer, a position, more top tokens than
                there are tokens, a target of several tokens, a stream of another width.
        """
        __tracebackhide__ = True
        _no_others("logit_lens", unknown)
        return self._drive(self._lens(prompts, residual, layers, top_k, positions, target, edits, progress))

    async def alogit_lens(
        self,
        *prompts: Any,
        residual: Any = None,
        layers: Any = "all",
        top_k: int = 10,
        positions: Any = "all",
        target: Any = None,
        edits: Sequence[str] | None = None,
        progress: Progress | None = None,
        **unknown: Any,
    ) -> Any:
        """`logit_lens`, awaited: other tasks of the caller's loop go on meanwhile."""
        __tracebackhide__ = True
        _no_others("alogit_lens", unknown)
        look = self._lens(prompts, residual, layers, top_k, positions, target, edits, progress)
        return await self._adrive(look)

    def attention(
        self,
        *prompts: Any,
        layers: Any = "all",
        heads: Any = "all",
        queries: Any = "all",
        dtype: str = "float32",
        max_bytes: int | str = "1GB",
        edits: Sequence[str] | None = None,
        progress: Progress | None = None,
        **unknown: Any,
    ) -> Any:
        """How much each token attends to each before it, computed from the model's queries and keys.

        vLLM's kernels never form the pattern. It is computed again in the worker, in float32, from what each
        attention is given after the rotary embedding, with the model's scale, soft cap, sliding window,
        sinks and grouped keys. That a pattern times the values is what the model's kernel computed is
        checked on every layer (unless edits run). Besides the patterns about 96 MiB are alive at once.

        Args:
            *prompts: As for `LocalEngine.trace`, text or token ids.
            layers: ``"all"``, ``"last"``, a number, or numbers; negative ones count from the last.
            heads: The same, of query heads.
            queries: The same, of the tokens to look from; keys are always the whole prompt.
            dtype: ``"float32"`` or ``"float16"``, of the result.
            max_bytes: Larger results than this are refused: ``layers x heads x queries x tokens`` numbers.
            edits: As for `LocalEngine.trace`.
            progress: Called with the share that is done, 0 to 1, after each piece of a long look.
            **unknown: Refused, with the nearest name there is.

        Returns:
            `Attention`; a list in prompt order where several prompts were given.

        Raises:
            LensRefused: Where a pattern would not be right: compressed keys (MLA), ALiBi, linear or sparse
                attention, keys of another layer, tensor or pipeline parallelism.
            RequestRefused: When a layer, head or token does not exist, or the result would be too large.
        """
        __tracebackhide__ = True
        _no_others("attention", unknown)
        return self._drive(
            self._attention(prompts, layers, heads, queries, dtype, max_bytes, edits, progress)
        )

    async def aattention(
        self,
        *prompts: Any,
        layers: Any = "all",
        heads: Any = "all",
        queries: Any = "all",
        dtype: str = "float32",
        max_bytes: int | str = "1GB",
        edits: Sequence[str] | None = None,
        progress: Progress | None = None,
        **unknown: Any,
    ) -> Any:
        """`attention`, awaited: other tasks of the caller's loop go on meanwhile."""
        __tracebackhide__ = True
        _no_others("aattention", unknown)
        look = self._attention(prompts, layers, heads, queries, dtype, max_bytes, edits, progress)
        return await self._adrive(look)

    # -- the two looks --------------------------------------------------------------------------

    def _lens(
        self,
        prompts: Sequence[Any],
        residual: Any,
        layers: Any,
        top_k: int,
        positions: Any,
        target: Any,
        edits: Sequence[str] | None,
        progress: Progress | None,
    ) -> Steps[Any]:
        self._require()
        if residual is None and prompts and all(_is_stream(one) for one in prompts):
            prompts, residual = (), prompts[0] if len(prompts) == 1 else list(prompts)
        question = LensQuestion(
            self,
            prompts,
            residual=residual,
            layers=layers,
            top_k=top_k,
            positions=positions,
            target=target,
        )
        if question.stream is None:
            lenses: list[LogitLens] = yield from self._prompts_of(question, "logit_lens", edits, progress)
            return Several(lenses) if question.several else lenses[0]
        pieces = question.pieces(_MESSAGE_BYTES, progress)
        lens: LogitLens = yield from self._told(question.read_stream(question.stream, pieces))
        return lens

    def _attention(
        self,
        prompts: Sequence[Any],
        layers: Any,
        heads: Any,
        queries: Any,
        dtype: str,
        max_bytes: int | str,
        edits: Sequence[str] | None,
        progress: Progress | None,
    ) -> Steps[Any]:
        self._require()
        question = AttentionQuestion(
            self, prompts, layers=layers, heads=heads, queries=queries, dtype=dtype, max_bytes=max_bytes
        )
        found: list[Attention] = yield from self._prompts_of(question, "attention", edits, progress)
        return Several(found) if question.several else found[0]

    def _prompts_of(
        self, question: Question[T], what: str, edits: Sequence[str] | None, progress: Progress | None
    ) -> Steps[list[T]]:
        """Ask of every prompt, in calls that keep the worker's memory bounded, and read what they kept."""
        prompts = question.prompts
        if not prompts:
            raise RequestRefused(f'There is no prompt: lab.{what}("…").')
        chosen = self.edits.chosen(edits)
        asked = [question.asked(index, check=not chosen) for index in range(len(prompts))]
        pieces = question.pieces(_MESSAGE_BYTES, progress)
        answers: list[T] = []
        try:
            while len(answers) < len(prompts):
                wave, held = [len(answers)], asked[len(answers)].held_bytes
                while (at := wave[-1] + 1) < len(prompts) and held + asked[at].held_bytes <= _WAVE_BYTES:
                    held += asked[at].held_bytes
                    wave.append(at)
                call = Call([self.request(prompts[i], _ONE_TOKEN, chosen, asked[i].block) for i in wave])
                self.submit(call)
                yield call
                self._looked(call)
                for i in wave:
                    answers.append((yield from self._told(question.read(i, asked[i].key, pieces))))
                    self._forget(asked[i])
            return answers
        finally:
            self._forget(*asked[len(answers) :])

    def _told(self, messages: Messages[T]) -> Steps[T]:
        """Send messages to the workers, one after the other."""
        answer: Any = None
        while True:
            try:
                message = messages.send(answer)
            except StopIteration as done:
                return cast("T", done.value)
            answers = yield self._driver.rpc(LOOK, encode(message))
            answer = cast("dict[str, Any]", decode(told_first(answers)))
            if "refused" in answer:
                raise LensRefused(f"It could not be read: {answer['refused']}.")

    def _forget(self, *asked: Asked) -> None:
        """Tell the workers to keep nothing for these any more; not waited for."""
        if asked and self.alive:
            self._driver.rpc(LOOK, encode({"drop": [one.key for one in asked]}))

    def _looked(self, call: Call) -> list[Any]:
        """The outputs of a call; the error of a block that is not the user's is not shown as theirs."""
        outputs = self.outputs(call)
        try:
            self.raise_errors(call, outputs)
        except BlockError as error:
            if error.block != "trace":
                raise
            kind = "" if error.type_name == LensRefused.__name__ else f"{error.type_name}: "
            raise LensRefused(f"Refused: {kind}{error.detail.rstrip('.')}.") from None
        return outputs

    # -- driving them ---------------------------------------------------------------------------

    def _drive(self, steps: Steps[T]) -> T:
        __tracebackhide__ = True
        answer: Any = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as done:
                    return cast("T", done.value)
                if isinstance(step, Call):
                    self.wait(step)
                else:
                    answer = self.waited(step)
        except KeyboardInterrupt as pressed:  # between two waits too
            if isinstance(pressed, Interrupted):
                raise
            raise Interrupted(INTERRUPTED) from None
        finally:
            steps.close()  # an interrupt ends the wait, and the look with it

    async def _adrive(self, steps: Steps[T]) -> T:
        __tracebackhide__ = True
        answer: Any = None
        try:
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as done:
                    return cast("T", done.value)
                if isinstance(step, Call):
                    await self.await_(step)
                else:
                    answer = await self.awaited(step)
        finally:
            steps.close()


def _is_stream(given: Any) -> bool:
    """A saved stream where a prompt could be: numbers that are no token ids, or a list of such."""
    if isinstance(given, list | tuple):
        return bool(given) and all(isinstance(one, torch.Tensor) and _is_stream(one) for one in given)
    return isinstance(given, torch.Tensor) and given.is_floating_point()


def _no_others(method: str, unknown: Mapping[str, Any]) -> None:
    """Refuse options that there are not."""
    for name in unknown:
        known = [
            one.name
            for one in inspect.signature(getattr(Looking, method)).parameters.values()
            if one.kind is one.KEYWORD_ONLY
        ]
        raise RequestRefused(f"{name!r} is not an option of {method}.{nearest(name, known)}")

"""Logit lenses and attention patterns of an engine: what is asked, in how many calls, what comes home.

The arithmetic runs in the worker, beside the weights (`nnsight_lab.worker.looking`); vocabulary-sized arrays
never leave it. Everything that can be wrong with a question is said here, in one line, before a request is
submitted.

Each look is written once, as a generator of steps (a call to run, or a message to the workers), which a sync
and an async method drive alike.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch

from nnsight_lab.engine.call import Call
from nnsight_lab.engine.questions import AttentionQuestion, LensQuestion, Question
from nnsight_lab.engine.service import EngineService
from nnsight_lab.errors import BlockError, LensRefused, RequestRefused
from nnsight_lab.lens.attention import Attention
from nnsight_lab.lens.logit_lens import LogitLens
from nnsight_lab.lens.shown import Several
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import LENS

T = TypeVar("T")
#: A call to run, or an answer of the workers to wait for.
Step = Call | Future[list[Any]]
Steps = Generator[Step, Any, T]

#: What the requests of one call may hold in the worker until they end.
_WAVE_BYTES = 512 << 20
#: How much of a saved stream goes to the worker in one message: the engine does nothing else meanwhile.
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
    ) -> Any:
        """What each layer would say next: its residual stream through the final norm and unembedding.

        The logit lens is nostalgebraist's ("interpreting GPT: the logit lens", LessWrong, 2020). Norm and
        unembedding are the model's own, run in the worker, so the last layer's lens is what the model
        says; that is checked on every prompt (unless edits run). Only the top tokens, entropies and ranks
        come home. Besides the streams of the requests under way (512 MiB at the most, else they go in
        several calls), the worker holds about 128 MiB of logits at a time.

        Args:
            *prompts: As for `LocalEngine.trace`, text or token ids; or none, with ``residual``.
            residual: A saved residual stream to read instead, as `nnsight_lab.residual` gives it:
                ``[layer, token, hidden]``, a list of ``[token, hidden]``, or one ``[token, hidden]``, in
                any float dtype (the worker uses the model's). A prompt beside it only names the tokens.
                ``layers`` then says which layers it holds; all of them, or ``0, 1, …``, when not given.
            layers: ``"all"``, a number, or numbers; negative ones count from the last.
            top_k: How many tokens for each layer and position.
            positions: ``"all"``, a place in the prompt, or places; negative ones count from the end.
            target: A token to follow: its id, or text that is exactly one token (`" Paris"`); a list
                gives each of several prompts its own.
            edits: As for `LocalEngine.trace`.

        Returns:
            `LogitLens`; a list in prompt order where several prompts were given.

        Raises:
            LensRefused: Where the lens would not be right on this model, and why.
            RequestRefused: When what is asked for does not exist: a layer, a position, more top tokens than
                there are tokens, a target of several tokens, a stream of another width.
        """
        __tracebackhide__ = True
        return self._drive(self._lens(prompts, residual, layers, top_k, positions, target, edits))

    async def alogit_lens(
        self,
        *prompts: Any,
        residual: Any = None,
        layers: Any = "all",
        top_k: int = 10,
        positions: Any = "all",
        target: Any = None,
        edits: Sequence[str] | None = None,
    ) -> Any:
        """`logit_lens`, awaited: other tasks of the caller's loop go on meanwhile."""
        __tracebackhide__ = True
        return await self._adrive(self._lens(prompts, residual, layers, top_k, positions, target, edits))

    def attention(
        self,
        *prompts: Any,
        layers: Any = "all",
        heads: Any = "all",
        queries: Any = "all",
        dtype: str = "float32",
        max_bytes: int | str = "1GB",
        edits: Sequence[str] | None = None,
    ) -> Any:
        """How much each token attends to each before it, computed from the model's queries and keys.

        vLLM's kernels never form the pattern. It is computed again in the worker, in float32, from what each
        attention is given after the rotary embedding, with the model's scale, soft cap, sliding window,
        sinks and grouped keys. That a pattern times the values is what the model's kernel computed is
        checked on every layer (unless edits run). Besides the patterns about 96 MiB are alive at once.

        Args:
            *prompts: As for `LocalEngine.trace`, text or token ids.
            layers: ``"all"``, a number, or numbers; negative ones count from the last.
            heads: The same, of query heads.
            queries: The same, of the tokens to look from; keys are always the whole prompt.
            dtype: ``"float32"`` or ``"float16"``, of the result.
            max_bytes: Larger results than this are refused: ``layers x heads x queries x tokens`` numbers.
            edits: As for `LocalEngine.trace`.

        Returns:
            `Attention`; a list in prompt order where several prompts were given.

        Raises:
            LensRefused: Where a pattern would not be right: compressed keys (MLA), ALiBi, linear or sparse
                attention, keys of another layer, tensor or pipeline parallelism.
            RequestRefused: When a layer, head or token does not exist, or the result would be too large.
        """
        __tracebackhide__ = True
        return self._drive(self._attention(prompts, layers, heads, queries, dtype, max_bytes, edits))

    async def aattention(
        self,
        *prompts: Any,
        layers: Any = "all",
        heads: Any = "all",
        queries: Any = "all",
        dtype: str = "float32",
        max_bytes: int | str = "1GB",
        edits: Sequence[str] | None = None,
    ) -> Any:
        """`attention`, awaited: other tasks of the caller's loop go on meanwhile."""
        __tracebackhide__ = True
        return await self._adrive(self._attention(prompts, layers, heads, queries, dtype, max_bytes, edits))

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
    ) -> Steps[Any]:
        self._require()
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
            lenses: list[LogitLens] = yield from self._prompts_of(question, "logit_lens", edits)
            return Several(lenses) if question.several else lenses[0]
        lens: LogitLens = yield from self._lens_of_stream(question, question.stream)
        return lens

    def _lens_of_stream(self, question: LensQuestion, stream: torch.Tensor) -> Steps[LogitLens]:
        """Read a saved stream, some positions at a time: a message, not a request."""
        parts: list[Mapping[str, torch.Tensor]] = []
        per_position = stream.shape[0] * stream.shape[2] * stream.element_size()
        step = max(1, _MESSAGE_BYTES // per_position)
        for at in range(0, stream.shape[1], step):
            asked = {**question.of_stream(), "stream": stream[:, at : at + step].contiguous()}
            answer = yield self._driver.rpc(LENS, encode(asked))
            found = cast("dict[str, Any]", decode(answer[0]))
            if "refused" in found:
                raise LensRefused(f"The stream could not be read: {found['refused']}.")
            parts.append(found)
        # Everything has positions as its second axis, but for the final ids, which have only them.
        return question.answer_of_stream(
            {
                name: torch.cat([part[name] for part in parts], dim=0 if name == "final_ids" else 1)
                for name in parts[0]
            }
        )

    def _attention(
        self,
        prompts: Sequence[Any],
        layers: Any,
        heads: Any,
        queries: Any,
        dtype: str,
        max_bytes: int | str,
        edits: Sequence[str] | None,
    ) -> Steps[Any]:
        self._require()
        question = AttentionQuestion(
            self, prompts, layers=layers, heads=heads, queries=queries, dtype=dtype, max_bytes=max_bytes
        )
        found: list[Attention] = yield from self._prompts_of(question, "attention", edits)
        return Several(found) if question.several else found[0]

    def _prompts_of(self, question: Question[T], what: str, edits: Sequence[str] | None) -> Steps[list[T]]:
        """Ask of every prompt, in as many calls as keep the worker's memory bounded."""
        prompts = question.prompts
        if not prompts:
            raise RequestRefused(f'There is no prompt: lab.{what}("…").')
        chosen = self.edits.chosen(edits)
        asked = [question.asked(index, check=not chosen) for index in range(len(prompts))]
        answers: list[T] = []
        while len(answers) < len(prompts):
            wave, held = [len(answers)], asked[len(answers)].held_bytes
            while (at := wave[-1] + 1) < len(prompts) and held + asked[at].held_bytes <= _WAVE_BYTES:
                held += asked[at].held_bytes
                wave.append(at)
            call = Call([self.request(prompts[i], _ONE_TOKEN, chosen, asked[i].block) for i in wave])
            self.submit(call)
            yield call
            for i, output in zip(wave, self._looked(call), strict=True):
                answers.append(question.answer(i, output.saves.trace["found"]))
        return answers

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
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Call):
                self.wait(step)
            else:
                answer = self.waited(step)

    async def _adrive(self, steps: Steps[T]) -> T:
        __tracebackhide__ = True
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                return cast("T", done.value)
            if isinstance(step, Call):
                await self.await_(step)
            else:
                answer = await self.awaited(step)

"""What the server does for its users: edits, calls, saves of OpenAI requests, leases.

All of it runs on the server's loop. A block is passed to the workers as it came and is never opened here;
what comes back is the workers' own encoding, opened by a codec that cannot run code.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.sampling import refusal, sampling_params
from nnsight_lab.errors import RequestRefused
from nnsight_lab.server.driver import ServedDriver
from nnsight_lab.server.identity import User
from nnsight_lab.server.ledger import Ledger, ServedEdit
from nnsight_lab.server.limits import Limits, Refused
from nnsight_lab.server.seen import output_seen
from nnsight_lab.wire.codec import WireError, decode, encode, encode_parts, size_of
from nnsight_lab.wire.keys import BUDGET_KEY, CLEAR, EDITS_KEY, LOOK, PEEK, REGISTER, TRACE_KEY
from nnsight_lab.wire.serving import (
    OPENAI_EDITS,
    CallAsked,
    CallOver,
    EditAsked,
    RequestAsked,
    SavesSeen,
)

#: Who sends the request that this task answers; set by the guard.
asker: ContextVar[User | None] = ContextVar("asker", default=None)

_SWEEP_S = 1.0


class OpenCall(NamedTuple):
    """A call that was taken on.

    Attributes:
        messages: The parts of one message after the other; the call begins with the first.
        over: To be awaited once nobody reads them any more, whether they began or not.
    """

    messages: AsyncIterator[list[Any]]
    over: Callable[[], Awaitable[None]]


class Held:
    """A place in the books, given up once, however often that is asked for.

    Args:
        over: What gives it up.
    """

    def __init__(self, over: Callable[[], None]) -> None:
        self._over: Callable[[], None] | None = over

    def let_go(self) -> None:
        """Give it up."""
        over, self._over = self._over, None
        if over is not None:
            over()


def asking() -> User:
    """Who sends the request that this task answers.

    Raises:
        Refused: Nobody is known: a way in that the guard does not watch.
    """
    user = asker.get()
    if user is None:
        raise Refused(401, "The request has no owner.")
    return user


class Desk:
    """One server's.

    Args:
        llm: vLLM's engine client.
        limits: Each user's.
        loras: Finds a served LoRA by name.
    """

    def __init__(self, llm: Any, limits: Limits, loras: Any = None) -> None:
        self.ledger = Ledger(limits)
        self.driver = ServedDriver(asyncio.get_running_loop(), llm)
        self._loras = loras
        self._vocabulary = int(llm.vllm_config.model_config.get_vocab_size())
        self._ending: set[asyncio.Future[None]] = set()
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """The server ends."""
        self._sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeping

    # -- edits -----------------------------------------------------------------------------------

    async def install(self, user: User, asked: EditAsked) -> None:
        """Install an edit.

        Raises:
            Refused: The books, or the workers, do not take it.
        """
        edit = self.ledger.add_edit(user, asked)
        try:
            await self.rpc(REGISTER, edit.registration, asked.payload, asked.name)
        except Exception as error:
            self.ledger.clear_edit(user, asked.id)
            raise Refused(400, f"The workers could not read the block ({_line(error)}).") from None

    async def clear(self, user: User, edit_ids: Sequence[str]) -> None:
        """Clear edits of this user; unknown ids are harmless."""
        gone = [self.ledger.clear_edit(user, one) for one in edit_ids]
        await self._forget([edit for edit in gone if edit is not None])

    async def end_lease(self, owner: str, lease: str) -> None:
        """End all that hangs on a lease."""
        await self._forget(self.ledger.end_lease(owner, lease))

    async def _forget(self, edits: Sequence[ServedEdit]) -> None:
        if edits:
            await self.rpc(CLEAR, [edit.registration for edit in edits])

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method on every rank."""
        return await asyncio.wrap_future(self.driver.rpc(method, *args))

    # -- calls of kernels --------------------------------------------------------------------------

    def call(self, user: User, asked: CallAsked) -> OpenCall:
        """Take a call on; nothing runs before its messages are asked for, and `OpenCall.over` must follow.

        Raises:
            Refused: It names what is not there, or is more than its owner may have.
        """
        lease = self.ledger.lease(user, asked.lease)
        edits = [self.ledger.named(user, one.edits) for one in asked.requests]
        requests = [self._request(one, mine) for one, mine in zip(asked.requests, edits, strict=True)]
        held = self._held(
            user, sum(one.params.n for one in requests), [edit for mine in edits for edit in mine]
        )
        call = Call(requests, live=asked.live)
        lease.calls[asked.id] = partial(self.driver.abort, call)

        ours = {one.id: request.id for one, request in zip(asked.requests, requests, strict=True)}
        lease.requests.update(ours)

        async def over() -> None:
            lease.calls.pop(asked.id, None)
            for one in ours:
                lease.requests.pop(one, None)
            if not call.future.done():
                await asyncio.wrap_future(self.driver.abort(call))
            held.let_go()

        return OpenCall(self._messages(call), over)

    def abort(self, user: User, lease: str, call_id: str) -> None:
        """Abort a call; an unknown one is harmless."""
        abort = self.ledger.lease(user, lease).calls.get(call_id)
        if abort is not None:
            abort()

    async def look(self, question: bytes) -> bytes:
        """A piece of a logit lens or of attention patterns, as the first rank has it."""
        return bytes((await self.rpc(LOOK, question))[0])

    async def peek(self, user: User, lease: str, question: bytes) -> bytes:
        """What a running request of this lease has saved so far; nothing of any other request."""
        try:
            asked = decode(question)
            request_id = self.ledger.lease(user, lease).requests.get(asked["request_id"])
        except (WireError, KeyError, TypeError):
            raise Refused(400, "The question cannot be read.") from None
        if request_id is None:
            return encode({})
        return bytes((await self.rpc(PEEK, encode({**asked, "request_id": request_id})))[0])

    def _request(self, asked: RequestAsked, edits: Sequence[ServedEdit]) -> LabRequest:
        try:
            params = sampling_params(asked.settings)
        except RequestRefused as refused:
            raise Refused(400, str(refused)) from None
        self._bound(params, asked.save_budget, [e.registration for e in edits], asked.block)
        return LabRequest(
            self._prompt(asked.prompt),
            params,
            # Only whether there are any matters here: the books hold them.
            edits=tuple(edits),  # type: ignore[arg-type]
            traced=asked.block is not None,
            wants_result=asked.wants_result,
            lora_request=self._lora(asked.lora),
        )

    def _prompt(self, prompt: Any) -> Any:
        """A prompt that the engine survives: text, or ids of tokens that there are.

        Raises:
            Refused: It is neither.
        """
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, dict) and len(prompt) == 1:
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if isinstance(text, str) and text:
                return prompt
            there = range(self._vocabulary)
            if isinstance(ids, list) and ids and all(type(one) is int and one in there for one in ids):
                return prompt
        raise Refused(400, "A prompt is text, or ids of tokens that the model has; nothing else is served.")

    def _bound(self, params: Any, budget: int | None, edits: list[str], block: bytes | None) -> None:
        """Put blocks and limits on a request, whatever it came with."""
        limits = self.ledger.limits
        extra: dict[str, Any] = {}
        if edits or block is not None:
            extra[BUDGET_KEY] = min(limits.saved_bytes, limits.saved_bytes if budget is None else budget)
            extra[EDITS_KEY] = edits
            if hasattr(params, "skip_reading_prefix_cache"):
                params.skip_reading_prefix_cache = True
        if block is not None:
            extra[TRACE_KEY] = block
        params.extra_args = extra or None
        if limits.max_tokens is not None:
            params.max_tokens = min(params.max_tokens or limits.max_tokens, limits.max_tokens)

    def _lora(self, name: str) -> Any:
        if not name:
            return None
        found = None if self._loras is None else self._loras(name)
        if found is None:
            raise Refused(404, f"No LoRA is served as {name!r}.")
        return found

    async def _messages(self, call: Call) -> AsyncIterator[list[Any]]:
        # Of each request the latest only: one that reads slowly gets fewer, not older ones.
        latest: dict[int, Any] = {}
        stir = asyncio.Event()

        def told(place: int, output: Any) -> None:
            latest[place] = output
            stir.set()

        call.on_output = told
        call.future.add_done_callback(lambda _: self.driver.stir(stir))
        self.driver.submit(call)
        while not call.future.done():
            await stir.wait()
            stir.clear()
            while latest:
                place, output = latest.popitem()
                if not output.finished:
                    yield [encode(output_seen(place, output))]
        error = call.future.exception()
        if error is not None:
            yield [encode(_over(error))]
            return
        for place, request in enumerate(call.requests):
            if request.output is not None:
                yield [encode(output_seen(place, request.output))]
            if request.has_blocks:
                yield encode_parts(SavesSeen(place, request.saves))
                request.saves, request.parcels = None, {}
        aborted = call.aborted.is_set()
        yield [encode(CallOver("Interrupted", "the requests were aborted") if aborted else CallOver())]

    # -- requests of OpenAI clients ------------------------------------------------------------------

    def openai_generate(self, generate: Any, prompt: Any, params: Any, request_id: str, settings: Any) -> Any:
        """An OpenAI client's request, with the edits that apply to it.

        A plain function: whose request it is stands in the caller's context, and not in that of the
        generator it returns.

        Raises:
            Refused: It names edits that are not there, or its owner has too many requests.
        """
        user = asking()
        extra: Mapping[str, Any] = params.extra_args or {}
        edits = self.ledger.chosen(user, extra.get(OPENAI_EDITS))
        params = params.clone()
        self._bound(params, None, [edit.registration for edit in edits], None)
        held = self._held(user, params.n, edits)
        stream = self._openai(user, edits, held, generate, prompt, params, request_id, settings)
        # A generator that nobody begins has no end of its own: of several prompts, one may be refused.
        weakref.finalize(stream, held.let_go).atexit = False
        return stream

    def _held(self, user: User, count: int, edits: Sequence[ServedEdit]) -> Held:
        """A request's place in the books, until it is let go.

        Raises:
            Refused: Its owner has too many.
        """
        self.ledger.begin(user, count)
        self.ledger.hold(edits)

        def over() -> None:
            self.ledger.end(user, count)
            gone = self.ledger.let_go(edits)
            if gone:
                self.driver.rpc(CLEAR, [edit.registration for edit in gone])

        return Held(over)

    async def _openai(
        self,
        user: User,
        edits: Sequence[ServedEdit],
        held: Held,
        generate: Any,
        prompt: Any,
        params: Any,
        request_id: str,
        settings: Mapping[str, Any],
    ) -> AsyncIterator[Any]:
        stream = generate(prompt, params, request_id, **settings)
        request = LabRequest(prompt, params, edits=tuple(edits), id=request_id)  # type: ignore[arg-type]
        collected = not edits
        try:
            async for output in stream:
                if output.finished and not collected:
                    request.output = output
                    await self.driver.collect(request)
                    collected = True
                    self._keep(user, request)
                yield output
        finally:
            # A task of its own: a client that left cancels this one, at every await anew.
            ending = asyncio.ensure_future(self._end(held, stream, None if collected else request_id))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, held: Held, stream: Any, left: str | None) -> None:
        """A request is over; ``left`` names it where its saves are still in the workers."""
        try:
            await stream.aclose()  # first: what is freed before the abort may be written again
            if left is not None:
                await self.driver.free([left])
        finally:
            held.let_go()

    def _keep(self, user: User, request: LabRequest) -> None:
        saves = request.saves
        if saves is not None and any(
            block.values or block.error for one in saves.sequences for block in one.blocks
        ):
            self.ledger.keep(user, request.id, saves, size_of(saves))

    # -- what ends -----------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.ledger.sweep()
            for lease in self.ledger.expired():
                with contextlib.suppress(Exception):
                    await self.end_lease(lease.owner, lease.id)


def _over(error: BaseException) -> CallOver:
    refused = error if isinstance(error, RequestRefused) else None
    if refused is None and isinstance(error, Exception):
        refused = refusal(error)
    if refused is not None:
        return CallOver("RequestRefused", str(refused))
    return CallOver("EngineDied", _line(error))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"

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
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from nnsight_lab.blocks.reach import touch_of_steps
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.facts import facts
from nnsight_lab.engine.prefixes import owner_of, reading, refuse_long, salted
from nnsight_lab.engine.ranks import told_first, told_together
from nnsight_lab.engine.sampling import refusal, sampling_params
from nnsight_lab.errors import RequestRefused
from nnsight_lab.server.audit import audit
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.door import Door
from nnsight_lab.server.driver import ServedDriver
from nnsight_lab.server.identity import User
from nnsight_lab.server.ledger import Ledger, ServedEdit
from nnsight_lab.server.limits import Limits, Refused
from nnsight_lab.server.notes import note
from nnsight_lab.server.parking import Parking
from nnsight_lab.server.seen import output_seen
from nnsight_lab.server.stopper import Stopper
from nnsight_lab.server.trust import SOLO, Trust
from nnsight_lab.server.turns import Turns
from nnsight_lab.steps.form import to_json
from nnsight_lab.wire.codec import WireError, decode, encode, encode_parts, size_of
from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.keys import (
    BUDGET_KEY,
    CLEAR,
    DECLARE,
    DECLARED_KEY,
    EDITS_KEY,
    LOOK,
    PEEK,
    REACH_KEY,
    REGISTER,
    RETIRE,
    TRACE_KEY,
)
from nnsight_lab.wire.serving import (
    ASKED_HEADER_BYTES,
    OPENAI_EDITS,
    CallAsked,
    CallOver,
    EditAsked,
    RequestAsked,
    SavesHere,
    SavesSeen,
)
from nnsight_lab.wire.step_figures import StepFigures
from nnsight_lab.wire.touch import UNKNOWN, Reach, Touch, together

#: Who sends the request that this task answers; set by the guard.
asker: ContextVar[User | None] = ContextVar("asker", default=None)

_SWEEP_S = 1.0
#: How long an abort may take before the block that runs is taken to be in its way.
_HEARD_S = 0.7
#: How long a question after steps waits for a worker.
_STEPS_S = 0.2


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
        trust: What it takes.
        loras: Finds a served LoRA by name.
        fair: Whether users take turns.
        share_prefixes: Whether users are served what others' prompts left in the prefix cache.
    """

    def __init__(
        self,
        llm: Any,
        limits: Limits,
        trust: Trust,
        loras: Any = None,
        *,
        fair: bool = True,
        share_prefixes: bool = False,
    ) -> None:
        self.ledger = Ledger(limits)
        self.trust = trust
        scheduler = llm.vllm_config.scheduler_config
        replicas = llm.vllm_config.parallel_config.data_parallel_size
        self.turns = Turns(
            scheduler.max_num_seqs * replicas, self.ledger.usage, fair=fair, most=limits.running
        )
        self.driver = ServedDriver(asyncio.get_running_loop(), llm, self.turns)
        self.driver.saw = self._saw
        self.stopper = Stopper()
        #: Called by whoever sees first that the engine died.
        self.noticed: Callable[[], None] = lambda: None
        self.parking = Parking(limits)
        self.door = Door(self.driver.home.reader, lambda paths: self._rpc_later(RETIRE, paths), limits)
        self._loras = loras
        self._caching = llm.vllm_config.cache_config
        self._share_prefixes = share_prefixes
        self._step_tokens = facts(llm.vllm_config).step_tokens
        self._vocabulary = int(llm.vllm_config.model_config.get_vocab_size())
        self._ending: set[asyncio.Future[None]] = set()
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """The server ends."""
        self.door.close()
        self._sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeping

    def require(self) -> None:
        """Refuse what asks for the engine where it takes nothing.

        Raises:
            Refused: With the reason, and when to come again.
        """
        if self.driver.dead():
            self.noticed()
        CONDITION.require()

    def figures(self) -> dict[str, Any]:
        """The books in figures."""
        return {**self.ledger.figures(), **self.parking.figures(), **self.door.figures()}

    # -- edits -----------------------------------------------------------------------------------

    async def install(self, user: User, asked: EditAsked) -> None:
        """Install an edit.

        Raises:
            Refused: The books, or the workers, do not take it.
        """
        self.require()
        steps, touch = None, claimed(asked.reach)
        if asked.declared:
            told = await self.trust.steps_of(asked.payload)
            steps, touch = to_json(told), touch_of_steps(told, asked.payload)
        else:
            self.trust.refuse_code()
        edit = self.ledger.add_edit(user, asked)
        edit.steps, edit.touch = steps, touch
        try:
            await self.rpc(
                DECLARE if asked.declared else REGISTER, edit.registration, asked.payload, asked.name
            )
        except Exception as error:
            # Of an engine that died it is in the books, and the next one is told of it.
            if not self.driver.dead() and CONDITION.state == "ready":
                self.ledger.clear_edit(user, asked.id)
                raise Refused(400, f"The workers could not read the block ({_line(error)}).") from None
        audit.note("edit install", user.name, asked.id, declared=asked.declared, nbytes=len(asked.payload))

    async def clear(self, user: User, edit_ids: Sequence[str]) -> None:
        """Clear edits of this user; unknown ids are harmless."""
        for one in edit_ids:
            known = self.ledger.has_edit(user, one)
            audit.note("edit clear", user.name, one, decision="done" if known else "unknown")
        gone = [self.ledger.clear_edit(user, one) for one in edit_ids]
        await self._forget([edit for edit in gone if edit is not None])

    def open_lease(self, user: User, lease: str) -> bool:
        """Begin or renew a lease; whether it was not there."""
        self.parking.open(user.name, lease)
        new = self.ledger.open_lease(user, lease)
        if new:
            audit.note("attach", user.name, lease)
        return new

    async def end_lease(self, owner: str, lease: str, why: str = "") -> None:
        """End all that hangs on a lease."""
        self.parking.close(owner, lease)
        self.door.end_lease(owner, lease)
        known = self.ledger.holds(owner, lease)
        edits = self.ledger.end_lease(owner, lease)
        decision = "done" if known else "unknown"
        audit.note("lease end", owner, lease, decision=decision, why=why, edits=len(edits))
        await self._forget(edits)

    async def _forget(self, edits: Sequence[ServedEdit]) -> None:
        if edits and not self.driver.dead():
            await self.rpc(CLEAR, [edit.registration for edit in edits])

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method on every rank."""
        return await asyncio.wrap_future(self.driver.rpc(method, *args))

    def _rpc_later(self, method: str, *args: Any) -> asyncio.Future[list[Any]]:
        return asyncio.ensure_future(self.rpc(method, *args))

    # -- calls of kernels --------------------------------------------------------------------------

    async def steps(self) -> StepFigures:
        """How steps ran, as far as that is known soon; names of edits are their owners' alone."""
        watch = self.driver.steps
        if CONDITION.state == "ready" and not self.driver.dead():
            await asyncio.to_thread(watch.look, _STEPS_S)
        return (watch.figures or StepFigures()).without_names()

    def call(self, user: User, asked: CallAsked, *, steps: bool = False) -> OpenCall:
        """Take a call on; nothing runs before its messages are asked for, and `OpenCall.over` must follow.

        Args:
            user: Whose.
            asked: What they sent.
            steps: Whether their kernel knows of a message that tells how a request's steps ran.

        Raises:
            Refused: It names what is not there, or is more than its owner may have.
        """
        self.require()
        lease = self.ledger.lease(user, asked.lease)
        for one in asked.requests:
            if one.block is not None:
                self.trust.refuse_code()
            if one.declared is not None:
                self.trust.look(one.declared)
        if asked.returned:
            self.door.take_back(user.name, lease.id, pieces_of(asked.returned))
        edits = [self.ledger.named(user, one.edits) for one in asked.requests]
        requests = [self._request(user, one, mine) for one, mine in zip(asked.requests, edits, strict=True)]
        held = self._held(
            user, sum(one.params.n for one in requests), [edit for mine in edits for edit in mine]
        )
        share = self.door.share(user.name, lease.id)
        if share:
            for request in requests:
                request.share(share)
        call = Call(requests, live=asked.live, tells_steps=steps)

        def give_up() -> object:
            call.given_up = True
            return asyncio.ensure_future(self._abort(call))

        lease.calls[asked.id] = give_up

        ours = {one.id: request.id for one, request in zip(asked.requests, requests, strict=True)}
        lease.requests.update(ours)
        self.driver.owners.update((request.id, user.name) for request in requests)

        messages = self._messages(call, user.name, lease.id, asked.id)
        audit.note("request begin", user.name, asked.id, requests=len(requests))

        async def over() -> None:
            lease.calls.pop(asked.id, None)
            for one in ours:
                lease.requests.pop(one, None)
            if not call.future.done():
                await self._abort(call)
            for request in requests:
                self.driver.owners.pop(request.id, None)
            held.let_go()
            if call.given_up or not call.heard_out:
                self._not_heard(user.name, lease.id, asked.id)
            audit.note("request end", user.name, asked.id, decision=_became(call), **_counts(call.requests))

        return OpenCall(messages, over)

    def abort(self, user: User, lease: str, call_id: str) -> None:
        """Abort a call; an unknown one is harmless."""
        abort = self.ledger.lease(user, lease).calls.get(call_id)
        if abort is not None:
            abort()
        else:
            self._not_heard(user.name, lease, call_id)

    def _not_heard(self, owner: str, lease: str, call: str) -> None:
        """A kernel did not hear a call out: nothing waits for it any more."""
        self.parking.end_call(owner, lease, call)
        self.door.withdraw(owner, lease, call)

    def abort_all(self) -> None:
        """Abort whatever runs, and refuse what waits: the server ends."""
        for lease in self.ledger.leases():
            for abort in list(lease.calls.values()):
                abort()
        self.turns.refuse(Refused(503, CONDITION.why, retry_after_s=CONDITION.retry_after_s))
        self.driver.abort_ids([turn.request_id for turn in self.turns.running.values()])

    async def _abort(self, call: Call) -> None:
        """Abort a call; a block of it that does not let the worker hear of that is broken off."""
        aborting = asyncio.wrap_future(self.driver.abort(call))
        await asyncio.wait({aborting}, timeout=_HEARD_S)
        if not aborting.done():
            self.stopper.break_off([request.id for request in call.requests])
        await aborting

    async def look(self, question: bytes) -> bytes:
        """A piece of a logit lens or of attention patterns, as the rank has it that keeps it."""
        return told_first(await self.rpc(LOOK, question))

    async def peek(self, user: User, lease: str, question: bytes) -> bytes:
        """What a running request of this lease has saved so far; nothing of any other request."""
        try:
            asked = decode(question)
            request_id = self.ledger.lease(user, lease).requests.get(asked["request_id"])
        except (WireError, KeyError, TypeError):
            raise Refused(400, "The question cannot be read.") from None
        if request_id is None:
            return encode({})
        return told_together(await self.rpc(PEEK, encode({**asked, "request_id": request_id})))

    def _request(self, user: User, asked: RequestAsked, edits: Sequence[ServedEdit]) -> LabRequest:
        try:
            params = sampling_params(asked.settings)
        except RequestRefused as refused:
            raise Refused(400, str(refused)) from None
        self._bound_answers(params)
        self._bound(params, asked.save_budget, [e.registration for e in edits], asked.block, asked.declared)
        touches = [edit.touch for edit in edits]
        if asked.block is not None or asked.declared is not None:
            touches.append(claimed(asked.reach) if asked.declared is None else UNKNOWN)
        code = asked.block is not None or any(edit.steps is None for edit in edits)
        return LabRequest(
            self._apart(user, self._prompt(asked.prompt), params, touches, code=code),
            params,
            # Only whether there are any matters here: the books hold them.
            edits=tuple(edits),  # type: ignore[arg-type]
            traced=asked.block is not None or asked.declared is not None,
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
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        if isinstance(prompt, dict) and len(prompt) == 1 + isinstance(salt, str):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if isinstance(text, str) and text:
                return prompt
            there = range(self._vocabulary)
            if isinstance(ids, list) and ids and all(type(one) is int and one in there for one in ids):
                return prompt
        raise Refused(400, "A prompt is text, or ids of tokens that the model has; nothing else is served.")

    def _apart(self, user: User, prompt: Any, params: Any, touches: Sequence[Touch], *, code: bool) -> Any:
        """A prompt kept apart in the prefix cache from those of others, and of other blocks.

        Args:
            user: Whose it is.
            prompt: As vLLM takes it.
            params: Its settings, which then say whether it reads the cache.
            touches: What its blocks touch.
            code: Whether one of them is code.

        Raises:
            Refused: Blocks read it, and it is longer than one step.
        """
        reach = together(touches)
        if reach is not None:
            params.extra_args = {**(params.extra_args or {}), REACH_KEY: reach.value}
            reading(params, reach)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        owner = owner_of(user.name, alone=self.trust.level == SOLO, shared=self._share_prefixes, code=code)
        try:
            refuse_long(len(ids or ()), self._step_tokens, reach)
            return salted(prompt, touches, owner) if self._caching.enable_prefix_caching else prompt
        except RequestRefused as refused:
            raise Refused(400, str(refused)) from None

    def _bound(
        self,
        params: Any,
        budget: int | None,
        edits: list[str],
        block: bytes | None = None,
        declared: bytes | None = None,
    ) -> None:
        """Put blocks and limits on a request, whatever it came with."""
        limits = self.ledger.limits
        extra: dict[str, Any] = {}
        if edits or block is not None or declared is not None:
            extra[BUDGET_KEY] = min(limits.saved_bytes, limits.saved_bytes if budget is None else budget)
            extra[EDITS_KEY] = edits
        if block is not None:
            extra[TRACE_KEY] = block
        if declared is not None:
            extra[DECLARED_KEY] = declared
        params.extra_args = extra or None
        if limits.max_tokens is not None:
            params.max_tokens = min(params.max_tokens or limits.max_tokens, limits.max_tokens)

    def _bound_answers(self, params: Any) -> None:
        most = self.ledger.limits.n
        if params.n > most:
            raise Refused(413, f"A request has at most {most:,} answers here, not n={params.n:,}.")

    def _lora(self, name: str) -> Any:
        if not name:
            return None
        found = None if self._loras is None else self._loras(name)
        if found is None:
            raise Refused(404, f"No LoRA is served as {name!r}.")
        return found

    async def _messages(self, call: Call, owner: str, lease: str, call_id: str) -> AsyncIterator[list[Any]]:
        framed = partial(self.parking.framed, owner, lease, call_id)
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
                    yield await framed(encode_parts(output_seen(place, output)))
        error = call.future.exception()
        if error is not None:
            if self.driver.dead():
                self.noticed()
            yield [encode(_over(error))]
            return
        for place, request in enumerate(call.requests):
            if request.has_blocks:
                parts = encode_parts(self._saves(place, request, owner, lease, call_id, call.tells_steps))
                request.saves, request.parcels, request.ranks = None, {}, ()
                yield await framed(parts)
            # After its saves, which take a while: a request that is finished is finished.
            if request.output is not None:
                yield await framed(encode_parts(output_seen(place, request.output)))
        aborted = call.aborted.is_set()
        if aborted and CONDITION.ending:
            yield [encode(CallOver("EngineDied", CONDITION.cause))]
        else:
            yield [encode(CallOver("Interrupted", "the requests were aborted") if aborted else CallOver())]
        call.heard_out = True

    def _saves(
        self, place: int, request: LabRequest, owner: str, lease: str, call_id: str, steps: bool
    ) -> SavesSeen | SavesHere:
        """What a request's blocks saved: where it lies, for a kernel that may map that; else all of it."""
        parcels = [parcel for some in request.parcels.values() for parcel in some]
        pieces = [piece for parcel in parcels for piece in parcel.pieces.items()]
        ranks, saves = request.ranks, request.saves
        if not steps:  # an older kernel refuses what it does not know
            ranks = tuple(replace(one, steps=None) for one in ranks)
            saves = None if saves is None else replace(saves, steps=None)
        if request.shared and self.door.lend(owner, lease, call_id, pieces):
            return SavesHere(place, ranks)
        return SavesSeen(place, saves)

    # -- requests of OpenAI clients ------------------------------------------------------------------

    def openai_generate(self, generate: Any, prompt: Any, params: Any, request_id: str, settings: Any) -> Any:
        """An OpenAI client's request, with the edits that apply to it.

        A plain function: whose request it is stands in the caller's context, and not in that of the
        generator it returns.

        Raises:
            Refused: It names edits that are not there, or its owner has too many requests.
        """
        user = asking()
        self.require()
        self._bound_answers(params)
        extra: Mapping[str, Any] = params.extra_args or {}
        edits = self.ledger.chosen(user, extra.get(OPENAI_EDITS))
        params = params.clone()
        self._bound(params, None, [edit.registration for edit in edits])
        code = any(edit.steps is None for edit in edits)
        prompt = self._apart(user, prompt, params, [edit.touch for edit in edits], code=code)
        held = self._held(user, params.n, edits)
        audit.note("request begin", user.name, request_id, requests=params.n, edits=len(edits))
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
        stream = self.driver.in_turn(
            user.name, generate, prompt, params, request_id, dict(settings), blocks=bool(edits)
        )
        request = LabRequest(prompt, params, edits=tuple(edits), id=request_id)  # type: ignore[arg-type]
        collected = not edits
        try:
            async for output in stream:
                request.output = output
                if output.finished and not collected:
                    self.driver.owners[request_id] = user.name
                    await self.driver.collect(request)
                    collected = True
                    self._keep(user, request)
                yield output
        except Exception as error:
            if type(error).__name__ != "EngineDeadError":
                raise
            self.require()
            raise
        finally:
            # A task of its own: a client that left cancels this one, at every await anew.
            self.driver.owners.pop(request_id, None)
            done = request.output is not None and request.output.finished
            audit.note(
                "request end",
                user.name,
                request_id,
                decision="done" if done else "aborted",
                **_counts([request]),
            )
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

    def _saw(self, user: str, request: LabRequest) -> None:
        """Count what a request saved, and note a block that was broken off."""
        if request.saves is None:
            return
        self.ledger.usage.of(user).saved_bytes += size_of(request.saves)
        for one in request.saves.sequences:
            for block in one.blocks:
                if block.error is not None and block.error.type_name == "BlockStopped":
                    note("block broken off", user=user, block=block.block, request=request.id)

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
            with contextlib.suppress(Exception):
                self.turns.look(self.driver.processor().request_states)
            self.parking.sweep()
            self.door.sweep()
            for lease in self.ledger.expired():
                with contextlib.suppress(Exception):
                    await self.end_lease(lease.owner, lease.id, "nobody renewed it")


def claimed(reach: str) -> Touch:
    """What a block of code touches, as its owner's kernel says: only that owner's requests rely on it."""
    return Touch(Reach.ANSWERS) if reach == Reach.ANSWERS.value else UNKNOWN


def pieces_of(said: bytes) -> list[Extent]:
    """Pieces of memory that a kernel gives back.

    Raises:
        Refused: They are none.
    """
    try:
        found = decode(said, max_header_bytes=ASKED_HEADER_BYTES)
    except WireError as error:
        raise Refused(400, f"The pieces cannot be read: {error}.") from None
    if type(found) is not list or not all(type(piece) is Extent for piece in found):
        raise Refused(400, "The request holds something else than pieces of memory.")
    return found


def _over(error: BaseException) -> CallOver:
    refused = error if isinstance(error, RequestRefused) else None
    if refused is None and isinstance(error, Exception):
        refused = refusal(error)
    if refused is not None:
        return CallOver("RequestRefused", str(refused))
    return CallOver("EngineDied", CONDITION.cause or _line(error))


def _became(call: Call) -> str:
    """What became of a call, in a word of the audit log."""
    if call.aborted.is_set() or not call.future.done():
        return "aborted"
    return "done" if call.future.exception() is None else "failed"


def _counts(requests: Sequence[LabRequest]) -> dict[str, Any]:
    """How many tokens requests had; not which."""
    outputs = [one.output for one in requests if one.output is not None]
    return {
        "prompt_tokens": sum(len(one.prompt_token_ids or ()) for one in outputs),
        "generated_tokens": sum(len(part.token_ids) for one in outputs for part in one.outputs),
    }


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"

"""The engine of vLLM's server as a driver: the same submitting, collecting and aborting as in a kernel.

Beyond that it knows whose each request is: a request waits for its owner's turn before vLLM has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from nnsight_lab.engine.async_driver import LoopDriver
from nnsight_lab.engine.call import LabRequest
from nnsight_lab.engine.homecoming import Homecoming
from nnsight_lab.server.turns import Turn, Turns
from nnsight_lab.wire.keys import RELEASE, STEPS


class ServedDriver(LoopDriver):
    """Drives an engine that vLLM's server started, and ends.

    Args:
        loop: The server's.
        llm: Its engine client.
        turns: Whose request goes next.

    Attributes:
        owners: Of requests of kernels, by id, for as long as they are there.
        awake: Returns once an engine that sleeps is awake.
        saw: Called with an owner and a request whose saves have come.
    """

    late_saves = False  # they go on as a message, and are counted

    def __init__(self, loop: asyncio.AbstractEventLoop, llm: Any, turns: Turns) -> None:
        super().__init__(loop)
        self._llm = llm
        self._turns = turns
        self._priorities = str(getattr(llm.vllm_config.scheduler_config, "policy", "")) == "priority"
        self.owners: dict[str, str] = {}
        self.awake: Callable[[], Awaitable[None]] = _awake
        self.saw: Callable[[str, LabRequest], None] = lambda _user, _request: None

    def stream(self, request: LabRequest) -> AsyncIterator[Any]:
        settings = {"lora_request": request.lora_request}
        user = self.owners.get(request.id, "")
        return self.in_turn(
            user,
            self._llm.generate,
            request.prompt,
            request.params,
            request.id,
            settings,
            blocks=request.has_blocks,
        )

    async def in_turn(
        self,
        user: str,
        generate: Callable[..., Any],
        prompt: Any,
        params: Any,
        request_id: str,
        settings: dict[str, Any],
        *,
        blocks: bool,
    ) -> AsyncIterator[Any]:
        """Outputs of a request, once it is its owner's turn."""
        turn = await self._turns.take(user, request_id, params.n, blocks=blocks)
        try:
            await self.awake()
            # What a client says of its own priority goes no further.
            settings["priority"] = turn.priority if self._priorities else 0
            stream = generate(prompt, params, request_id, **settings)
            counted = _Counted(self._turns, turn, delta=params.output_kind.name == "DELTA")
            try:
                async for output in stream:
                    counted.saw(output)
                    yield output
            finally:
                await stream.aclose()
        finally:
            self._turns.give(turn)

    async def collect(self, request: LabRequest) -> None:
        await super().collect(request)
        self.saw(self.owners.get(request.id, ""), request)

    def rpc(self, method: str, *args: Any) -> Future[list[Any]]:
        async def call() -> list[Any]:
            if method not in (RELEASE, STEPS):  # what is let go of, or only looked at, does not wake it
                await self.awake()
            result: list[Any] = await self._llm.collective_rpc(method, args=args)
            return result

        return self._schedule(call())

    def abort_ids(self, request_ids: list[str]) -> None:
        """Abort requests, whoever made them; not waited for."""
        self._schedule(self._llm.abort(request_ids))

    def renewed(self) -> None:
        """The engine is another: what the last one's workers kept in memory is theirs no more."""
        self.home.close()
        self.home = Homecoming(self._release)

    def start(self, model: str, options: dict[str, Any]) -> Future[None]:
        """Refused: the engine is there."""
        raise NotImplementedError

    def stop(self) -> None:
        """Nothing: the server ends its engine."""

    def close(self) -> None:
        """Nothing: the loop is the server's."""

    def stir(self, event: asyncio.Event) -> None:
        """Set an event of the loop, from whatever thread."""
        self._loop.call_soon_threadsafe(event.set)


async def _awake() -> None:
    """It never sleeps."""


class _Counted:
    """Counts a request's tokens as its outputs come."""

    def __init__(self, turns: Turns, turn: Turn, *, delta: bool) -> None:
        self._turns = turns
        self._turn = turn
        self._delta = delta
        self._tokens: dict[int, int] = {}

    def saw(self, output: Any) -> None:
        """Take an output: of a step's tokens, or of all so far."""
        for one in output.outputs:
            before = self._tokens.get(one.index, 0) if self._delta else 0
            self._tokens[one.index] = before + len(one.token_ids)
        self._turns.saw(self._turn, len(output.prompt_token_ids or ()), sum(self._tokens.values()))

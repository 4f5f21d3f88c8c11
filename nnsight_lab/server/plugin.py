"""Hangs this package into vLLM's OpenAI server, at the seam that vLLM has for it.

vLLM loads an endpoint plugin once, in the process that answers HTTP: its routes are attached while the app is
built, and it is given the engine's client when that is there. The handlers of completions and chat are then
given a client of ours in its place, whose requests run edits and leave nothing behind.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from nnsight_lab.engine.facts import facts
from nnsight_lab.server import keeping, workers
from nnsight_lab.server.command import Settings
from nnsight_lab.server.describe import served
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.guard import refusal
from nnsight_lab.server.identity import User
from nnsight_lab.server.limits import Refused
from nnsight_lab.server.routes import router
from nnsight_lab.wire.codec import decode
from nnsight_lab.wire.keys import DESCRIBE
from nnsight_lab.wire.serving import Served


class LabClient(AsyncLLM):  # type: ignore[misc]
    """vLLM's client as its OpenAI handlers see it: each request runs its owner's edits.

    It shares the state of the client that the server made, which alone ends the engine.
    """

    lab_desk: Desk

    @classmethod
    def over(cls, llm: AsyncLLM, desk: Desk) -> LabClient:
        """A client that shares the engine of another."""
        client = object.__new__(cls)
        client.__dict__ = llm.__dict__
        llm.__dict__["lab_desk"] = desk
        return client

    def __del__(self) -> None:
        """Nothing: AsyncLLM's own would shut the engine down."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **settings: Any) -> Any:
        """Outputs of a request of an OpenAI client."""
        generate = super().generate
        return self.lab_desk.openai_generate(generate, prompt, sampling_params, request_id, settings)


class LabPlugin:
    """vLLM's ``EndpointPlugin``."""

    name = "nnsight_lab"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings = Settings.of_environment(os.environ)

    def attach_router(self, app: Any) -> None:
        """Attach routes, and the form of refusals; the guard is a middleware of its own."""
        app.include_router(router)
        app.include_router(workers.router)
        app.add_exception_handler(Refused, lambda _, refused: refusal(refused))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The engine is there."""
        loras = getattr(state.openai_serving_models, "lora_requests", {})
        desk = Desk(engine_client, self._settings.limits, loras.get)
        state.nnsight_lab_desk = desk
        state.nnsight_lab_health = lambda: {
            "level": self._settings.level,
            "model": facts(engine_client.vllm_config).model,
            **desk.ledger.figures(),
        }
        modules: list[Any] = []

        async def describe(user: User) -> Served:
            if not modules:
                told = await engine_client.collective_rpc(DESCRIBE)
                modules.extend(decode(told[0]))
            return served(
                engine_client.vllm_config,
                tuple(modules),
                level=self._settings.level,
                user=user.name,
                admin=user.admin,
                saved_bytes=self._settings.limits.saved_bytes,
            )

        state.nnsight_lab_describe = describe
        ours = LabClient.over(engine_client, desk)
        for handler in list(state._state.values()):
            if getattr(handler, "engine_client", None) is engine_client:
                handler.engine_client = ours
        state.nnsight_lab_keeping = keeping.begin(desk.ledger)

"""Hangs this package into vLLM's OpenAI server, at the seam that vLLM has for it.

vLLM loads an endpoint plugin once, in the process that answers HTTP: its routes are attached while the app is
built, and it is given the engine's client when that is there. The handlers of completions and chat are then
given a client of ours in its place, whose requests run edits and leave nothing behind.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from nnsight_lab.engine.facts import facts
from nnsight_lab.server import keeping, workers
from nnsight_lab.server.admin import router as admin_router
from nnsight_lab.server.audit import audit
from nnsight_lab.server.care import look_after
from nnsight_lab.server.command import Settings
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.describe import served
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.guard import refusal
from nnsight_lab.server.identity import User
from nnsight_lab.server.limits import Refused
from nnsight_lab.server.routes import router
from nnsight_lab.server.step_routes import router as step_router
from nnsight_lab.server.trust import Trust
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

    @property
    def errored(self) -> bool:
        """Never true: of a dead engine it is said in our words why, and when to come again.

        Raises:
            Refused: The engine is dead.
        """
        if super().errored:
            self.lab_desk.require()
        return bool(super().errored)

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
        self._settings = Settings.left()

    def attach_router(self, app: Any) -> None:
        """Attach routes, and the form of refusals; the guard is a middleware of its own."""
        app.include_router(router)
        app.include_router(admin_router)
        app.include_router(step_router)
        app.include_router(workers.router)
        app.add_exception_handler(Refused, lambda _, refused: refusal(refused))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The engine is there."""
        loras = getattr(state.openai_serving_models, "lora_requests", {})
        settings = self._settings
        trust = Trust(engine_client, settings.level, settings.jail)
        await trust.enter(settings.jail_uid, settings.jail_no_user)
        desk = Desk(
            engine_client,
            settings.limits,
            trust,
            loras.get,
            fair=settings.fair,
            share_prefixes=settings.share_prefixes,
        )
        state.nnsight_lab_trust = trust
        state.nnsight_lab_desk = desk
        state.nnsight_lab_tasks = look_after(engine_client, state, args, desk, settings)
        state.nnsight_lab_health = lambda: {
            **trust.figures(),
            "model": facts(engine_client.vllm_config).model,
            "state": CONDITION.state,
            "deaths": CONDITION.deaths,
            **desk.figures(),
            "audit_missed": audit.missed,
        }

        async def describe(user: User) -> Served:
            return served(
                engine_client.vllm_config,
                tuple(await trust.modules()),
                level=trust.level,
                jail=trust.said(),
                user=user.name,
                admin=user.admin,
                saved_bytes=self._settings.limits.saved_bytes,
                requests=self._settings.limits.requests,
                door=desk.door.name,
            )

        state.nnsight_lab_describe = describe
        ours = LabClient.over(engine_client, desk)
        for handler in list(state._state.values()):
            if getattr(handler, "engine_client", None) is engine_client:
                handler.engine_client = ours
        state.nnsight_lab_keeping = keeping.begin(desk.ledger)

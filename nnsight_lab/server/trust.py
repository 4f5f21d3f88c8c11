"""How far the users of a server are trusted: what may run in its workers, and what jail those are in.

``solo`` and ``team`` take blocks, which are Python in the workers; ``strict`` takes edits that are data, and
looks, which are this package's own code. What is refused is refused before anything of it is unpickled: the
server never does, and a strict worker does not either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnsight_lab.blocks.declared import DeclaredBlock, told
from nnsight_lab.engine.facts import facts
from nnsight_lab.errors import EditRefused, ServeRefused
from nnsight_lab.server.limits import Refused
from nnsight_lab.steps.check import fitted
from nnsight_lab.steps.step import Step
from nnsight_lab.wire.codec import WireError, decode
from nnsight_lab.wire.keys import DESCRIBE, TRUST
from nnsight_lab.wire.serving import LEVELS, ModuleSeen

STRICT = "strict"
SOLO = "solo"

#: The jail's layer that is decided here (see `nnsight_lab.worker.jail`, which is not imported here).
OWN_USER = "own user"

NO_CODE = (
    "This server is of level strict: it takes edits that are data, as "
    'lab.edit("steer", steps=[lab.steps.add(…)]), and no block of code.'
)


class Trust:
    """What one server takes.

    Args:
        llm: vLLM's engine client.
        level: One of `LEVELS`.
        jail: ``auto``, ``on`` or ``off``.
    """

    def __init__(self, llm: Any, level: str, jail: str = "off") -> None:
        self._llm = llm
        self.level = level
        self.jail = jail
        #: Layer of the jail -> ``yes``, or why not; empty where there is none.
        self.layers: dict[str, str] = {}
        self._modules: list[ModuleSeen] = []
        self._user: tuple[int | None, str] = (None, "")

    async def enter(self, uid: int | None, why: str = "") -> None:
        """Tell the workers the level, and put them into their jail.

        Args:
            uid: Whose they become; None where they stay this user's.
            why: Then the reason.

        Raises:
            ServeRefused: The jail was asked for, and a part of it could not be had.
        """
        self._user = (uid, why)
        answers = await self._llm.collective_rpc(TRUST, args=(self.level, self.jail != "off", uid))
        merged = {OWN_USER: f"no: {why}"} if self.jail != "off" and uid is None else {}
        for layers in answers:
            for layer, said in layers.items():
                if merged.get(layer, "yes").startswith("yes"):
                    merged[layer] = said
        self.layers = merged
        if self.jail == "on":
            missing = [f"{layer} ({said})" for layer, said in merged.items() if not said.startswith("yes")]
            if missing:
                raise ServeRefused(
                    f"The workers' jail could not be closed: {'; '.join(missing)}. --jail=auto does without "
                    "what cannot be had, and says so."
                )
        # Not logged: whoever starts a server must see it, whatever becomes of its log.
        print(f"nnsight-lab: level {self.level} ({LEVELS[self.level]}); jail: {self.said()}", flush=True)

    async def again(self) -> None:
        """Tell the workers of another engine what those before were told."""
        await self.enter(*self._user)

    def said(self) -> str:
        """The jail in one line."""
        if not self.layers:
            return "off"
        return "; ".join(f"{layer}: {said}" for layer, said in self.layers.items())

    def figures(self) -> dict[str, Any]:
        """Level and jail, for whoever asks."""
        return {
            "level": self.level,
            "level_means": LEVELS[self.level],
            "jail": self.jail if self.layers else "off",
            "jail_layers": self.layers,
        }

    def refuse_code(self) -> None:
        """Refuse a block of code, where none is taken.

        Raises:
            Refused: This server is strict.
        """
        if self.level == STRICT:
            raise Refused(403, NO_CODE)

    async def modules(self) -> list[ModuleSeen]:
        """The model's, as its first worker has them."""
        if not self._modules:
            answers = await self._llm.collective_rpc(DESCRIBE)
            self._modules.extend(decode(answers[0]))
        return self._modules

    def look(self, payload: bytes) -> None:
        """See that a block of a request that travels as data is one of ours.

        Raises:
            Refused: It is not.
        """
        try:
            told(payload)
        except WireError as error:
            raise Refused(400, f"The block cannot be read: {error}.") from None

    async def steps_of(self, payload: bytes) -> tuple[Step, ...]:
        """The steps of an edit that travels as data.

        Raises:
            Refused: They are none, or do not fit the model.
        """
        try:
            kind, asked = told(payload)
        except WireError as error:
            raise Refused(400, f"The edit cannot be read: {error}.") from None
        if kind != "steps":
            raise Refused(400, "An edit that is data is told as steps.")
        return await self.fitted(asked)

    async def fitted(self, asked: Mapping[str, Any]) -> tuple[Step, ...]:
        """Steps in the model's order.

        Raises:
            Refused: They are none, or do not fit the model.
        """
        known = facts(self._llm.vllm_config)
        modules = {one.path: one.kind for one in await self.modules()}
        try:
            return fitted(asked.get("steps"), modules, layers=known.layers, hidden=known.hidden)
        except EditRefused as refused:
            raise Refused(400, str(refused)) from None


def payload_of(steps: tuple[Step, ...]) -> bytes:
    """Steps as the workers take them."""
    return DeclaredBlock.of("steps", {"steps": steps}).dumps()

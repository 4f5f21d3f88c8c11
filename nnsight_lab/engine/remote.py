"""An engine that runs elsewhere: the same cells, over HTTP, against a kept engine or a shared server."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.engine import hub_service
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.config import EngineConfig, Mode, loop_is_running
from nnsight_lab.engine.driver import Driver, Flight
from nnsight_lab.engine.edits import EditVersion
from nnsight_lab.engine.local import Engine
from nnsight_lab.engine.remote_driver import RemoteDriver
from nnsight_lab.engine.remote_tree import RemoteTree
from nnsight_lab.engine.status import EngineStatus, StartProgress, StopReport
from nnsight_lab.engine.step_words import NO_GRAPHS_ON_CPU
from nnsight_lab.errors import EditRefused, EngineDied, LensRefused, RequestRefused, ServerError, nearest
from nnsight_lab.wire.serving import LEVELS, EngineFacts, Served
from nnsight_lab.wire.touch import Touch

_NO_ESTIMATE = "An estimate needs an engine of this kernel's own: what is left is the server's to know."
#: HTTP's for an edit that is installed already.
_THERE = 409
_NO_TOKEN = 401


@dataclass
class RemoteSampling:
    """Sampling settings on their way: what stands here for vLLM's ``SamplingParams``."""

    settings: dict[str, Any]
    extra_args: dict[str, Any] | None = None
    n: int = 1
    max_tokens: int | None = 16
    ignore_eos: bool = False
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = field(default=False)


class RemoteEngine(Engine):
    """An engine that a server runs; made by `nnsight_lab.attach`.

    Args:
        name: The engine's.
        url: The server's.
        token: Who asks; of the environment, where it is None.
        same_host: Whether saves are mapped, where the server is this user's and on this machine.

    Attributes:
        url: The server's.
    """

    def __init__(
        self,
        name: str,
        url: str,
        token: str | None = None,
        config: EngineConfig | None = None,
        *,
        same_host: bool = True,
    ) -> None:
        # Of an engine that this user keeps, the socket is found when it is started or attached to.
        self.url = hub_service.checked(url) if config is None else url
        self._token = token
        self._same_host = same_host
        mode: Mode = "async" if loop_is_running() else "sync"
        super().__init__(name, config or EngineConfig(url, mode))

    def _new_driver(self) -> Driver:
        token = hub_service.token_for(self.url) if self._token is None else self._token
        self._remote = RemoteDriver(self.url, token, same_host=self._same_host)
        return self._remote

    def __repr__(self) -> str:
        return f"<RemoteEngine {self.name!r}: {self.config.model}, {self.state()[0]}>"

    # -- its life --------------------------------------------------------------------------------

    def start(self, progress: Callable[[StartProgress], None] | None = None) -> Self:
        """Attach: the server's engine runs already.

        Raises:
            ServerError: The server is not there, or does not let this kernel in.
        """
        __tracebackhide__ = True
        if self._state != "stopped":
            return self
        if self._used:
            self._fresh()
        self._used = True
        try:
            served = self._remote.attach()
            self._remote.model = RemoteTree(served)
        except BaseException as error:
            self._remote.home.close()
            self._remote.close()
            if isinstance(error, ServerError) and error.status == _NO_TOKEN:
                raise ServerError(f"{error}{hub_service.without_token(self.url)}", status=_NO_TOKEN) from None
            raise
        self._remote.lapsed = self._reinstall
        self._remote.home.limits = {"memory_bytes": served.saved_bytes, "spill_bytes": 0}
        self._origin.versions = served.versions
        self.model.lab_engine = weakref.proxy(self)
        self._state = "ready"
        self._ready_at = self._touched = time.monotonic()
        self._reinstall()
        return self

    def _reinstall(self) -> None:
        self._remote.reaches.update((one.id, one.touch.reach.value) for one in self.edits.installed())
        for method, args in self.edits.reinstall_steps():
            try:
                self.rpc(method, *args)
            except ServerError as error:
                if error.status != _THERE:  # one that is published outlives its kernel's lease
                    raise

    def stop(self) -> StopReport:
        """Let go of the server's engine, as `detach`: it is not this kernel's to end."""
        return self.detach()

    def detach(self) -> StopReport:
        """Let go of the server's engine, which goes on for others; this kernel's edits leave it."""
        with self._stop_lock:
            began = time.monotonic()
            if self._state != "stopped":
                self._remote.stop()
                self._remote.home.close()
                self._remote.close()
            self._state = "stopped"
            return StopReport(self.name, (), (), 0, time.monotonic() - began)

    @property
    def served(self) -> Served:
        """What the server said of itself."""
        self._require()
        assert self._remote.served is not None
        return self._remote.served

    def facts(self) -> EngineFacts:
        """What there is to know of the engine without asking it."""
        return self.served.facts

    def no_sleep(self) -> str:
        """Why it cannot sleep, in one line."""
        return f"Engine {self.name!r} is a server's: others use it, too."

    def died(self) -> EngineDied | None:
        """The error to raise when the server is gone, or None."""
        if self._state != "ready" or not self._remote.dead():
            return None
        cause = self._remote.cause
        return EngineDied(f"Engine {self.name!r} is lost: {cause} `%engine attach {self.url}`.", cause=cause)

    def state(self) -> tuple[str, str]:
        """``ready``, ``busy``, ``dead`` or ``stopped``; and why, where it is dead."""
        dead = self.died()
        if dead is not None:
            return "dead", dead.cause
        if self._state != "ready":
            return self._state, ""
        return ("busy" if self._remote.unfinished() else "ready"), ""

    def attach_line(self) -> str:
        """The line that attaches another kernel to it; it holds no token."""
        return f"%engine attach {self.url}"

    def kv_blocks(self) -> int:
        """0: how full the cache is, is told to nobody."""
        return 0

    def flight(self) -> Flight:
        """This kernel's calls; others' are not told."""
        return Flight(running=self._remote.unfinished(), tokens=self._remote.generated)

    def no_graphs(self) -> str:
        """Why nothing is replayed on it; "" also where its server alone knows that."""
        served = self._remote.served
        return NO_GRAPHS_ON_CPU if served is not None and served.facts.device == "cpu" else ""

    def status(self) -> EngineStatus:
        """The engine as it stands."""
        state, cause = self.state()
        served = self._remote.served
        known = served.facts if served is not None else None
        status = EngineStatus(
            name=self.name,
            state=state,
            model=f"{known.model} at {self.url}" if known is not None else self.url,
            mode=self.mode,
            device=known.device if known is not None else "",
            dtype=known.dtype if known is not None else "",
            up_s=self.up_s(),
            running=self._remote.unfinished(),
            edits=tuple(f"{e.name} ({'on' if e.on else 'off'})" for e in self.edits),
            options=self.shown_options(),
            cause=cause,
            level="" if served is None else f"{served.level}: {LEVELS.get(served.level, 'unknown here')}",
            jail="" if served is None else served.jail or "off",
        )
        return self._with_steps(status)

    def shown_options(self) -> tuple[tuple[str, object], ...]:
        """How far the server keeps its users apart, in words short enough for a panel."""
        served = self._remote.served
        if served is None:
            return ()
        jail = served.jail or "off"
        if jail != "off":
            jail = "in part" if ": no: " in jail else "on"
        return (("level", served.level), ("jail", jail), ("saves are", self._remote.road))

    # -- requests ----------------------------------------------------------------------------------

    def request(
        self,
        prompt: Any,
        settings: Mapping[str, Any],
        versions: tuple[EditVersion, ...],
        block: Block | None = None,
    ) -> LabRequest:
        if block is not None:
            self._no_code(block)
        return super().request(prompt, settings, versions, block)

    def version_of(self, name: str, block: Block) -> EditVersion:
        self._no_code(block)
        version = super().version_of(name, block)
        self._remote.reaches[version.id] = version.touch.reach.value
        return version

    def _apart(self, prompt: Any, touches: Sequence[Touch]) -> Any:
        """The prompt as it is: the server, which knows whose it is, keeps it apart."""
        return prompt

    def _no_code(self, block: Block) -> None:
        """Say on the block's own line what the server would say."""
        __tracebackhide__ = True
        if self.served.level == "strict" and not isinstance(block, DeclaredBlock):
            raise EditRefused(
                f"{self.url} is of level strict: it takes edits that are data, as "
                'lab.edit("steer", steps=[lab.steps.add(…)]), and no block of code.'
            )

    def sampling(self, settings: Mapping[str, Any]) -> Any:
        """The settings as they travel; the server has the last word on their values."""
        settings = dict(settings)
        if "max_new_tokens" in settings:
            settings.setdefault("max_tokens", settings.pop("max_new_tokens"))
            settings.pop("max_new_tokens", None)
        known = self.served.sampling
        for name in settings:
            if name not in known:
                raise RequestRefused(f"{name!r} is not a sampling setting.{nearest(name, known)}")
        extra = settings.pop("extra_args", None)
        own = {name: settings[name] for name in ("n", "max_tokens", "ignore_eos") if name in settings}
        return RemoteSampling(settings, extra, **own)

    def may_exceed(self, requests: Sequence[LabRequest]) -> bool:
        """False: the server looks at each request, and others' saves are not known here."""
        return False

    def break_off(self, call: Call) -> None:
        """Nothing: the server ends a block that never ends."""

    # -- what a shared engine cannot do yet -------------------------------------------------------------

    def _attention(self, *_: Any) -> Any:
        raise LensRefused("Attention patterns need an engine of this kernel's own: heads are not told.")

    def estimate_steps(self, requests: Sequence[LabRequest]) -> Any:
        """Refused: the room that is left is the server's to know."""
        raise RequestRefused(_NO_ESTIMATE)

    def _asked(self, *_: Any) -> Any:
        raise RequestRefused(_NO_ESTIMATE)

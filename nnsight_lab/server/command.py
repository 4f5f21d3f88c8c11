"""What `nnsight-lab serve` runs: vLLM's own OpenAI server, with this package's worker and routes.

The settings, with users' tokens among them, are left for the server's plugin in this process's memory: what
stands in its environment, the engine's processes are born with, and a block must find no token there.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from nnsight_lab.engine import homecoming, models, processes
from nnsight_lab.engine.config import needs_ray
from nnsight_lab.engine.model import executor, prompts_cut, worker_class
from nnsight_lab.engine.starting import cpus_of_ranks
from nnsight_lab.errors import EngineDied, ServeRefused
from nnsight_lab.server import jailing, keeping, replaying, stopper
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.environment import take
from nnsight_lab.server.hub import Hub
from nnsight_lab.server.identity import Identity, Owner, Tokens, User
from nnsight_lab.server.limits import Limits
from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, OWNER_ENV, SAVES_CONFIG, SCHEDULER

#: Of the server that this process runs.
_left: list[Settings] = []


@dataclass(frozen=True)
class Settings:
    """How a server is run.

    Attributes:
        level: ``solo``, ``team`` or ``strict``.
        users: Names by token, those of admins with a ``*`` before; empty where a hub or a socket tells.
        hub: What this service is called at the JupyterHub that tells who users are; "" without one.
        admins: Hub groups whose members may publish.
        prefix: Where the service lies in the hub.
        limits: Each user's.
        metrics_token: Whoever has it may read the metrics, and nothing else; "" for admins only.
        drain_s: How long requests may go on after SIGTERM.
        step_limit_s: How long a block may hold everybody up.
        restarts: How often in ten minutes an engine that died is started again.
        sleep_after_s: Idle for that long, the engine sleeps; None for never.
        audit: The file of the audit log; "" for none.
        jail: ``auto``, ``on`` or ``off``.
        jail_uid: Whose the workers become; None where they stay this user's.
        jail_no_user: Then why.
        share_prefixes: Whether users are served what others' prompts left in the prefix cache.
    """

    level: str = "team"
    users: dict[str, str] = field(default_factory=dict)
    hub: str = ""
    admins: tuple[str, ...] = ()
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)
    metrics_token: str = ""
    drain_s: float = 30.0
    step_limit_s: float = 60.0
    restarts: int = 3
    sleep_after_s: float | None = None
    audit: str = ""
    jail: str = "off"
    jail_uid: int | None = None
    jail_no_user: str = ""
    share_prefixes: bool = False

    @property
    def fair(self) -> bool:
        """Whether users take turns; one who is alone need not."""
        return self.level != "solo"

    def leave(self) -> None:
        """Leave them for the plugin and the guard."""
        _left.append(self)

    @classmethod
    def left(cls) -> Settings:
        """Those that were left.

        Raises:
            ServeRefused: There are none: the plugin was loaded by something else than `nnsight-lab serve`.
        """
        if not _left:
            raise ServeRefused("The server's plugin is loaded by `nnsight-lab serve` only.")
        return _left[-1]

    def identity(self) -> Identity:
        """How users are told apart."""
        if self.hub:
            from jupyterhub.services.auth import HubAuth  # only a hub's service has it

            return Hub(HubAuth(api_token=""), self.hub, frozenset(self.admins))
        if not self.users:
            return Owner()
        return Tokens(
            {token: User(name.removeprefix("*"), name.startswith("*")) for token, name in self.users.items()}
        )


def arguments(
    model: str, flags: Sequence[str], settings: Settings | None = None, spill: Path | None = None
) -> list[str]:
    """VLLM's arguments for a server in which blocks run.

    Args:
        model: As for `nnsight_lab.start`.
        flags: The user's own, in vLLM's words; they win.
        settings: How the server is run.
        spill: Where saves go past the memory that they have; where this user's do where it is None.

    Raises:
        ServeRefused: It should sleep, and cannot here.
    """
    settings = settings or Settings()
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    on_cpu = current_platform.is_cpu()
    saves = homecoming.settings(secrets.token_hex(6), {})
    if spill is not None:
        saves["spill_dir"] = str(spill)
    told = {SAVES_CONFIG: saves, **replaying.additional(flags, on_cpu=on_cpu)}
    own = [
        f"--worker-cls={worker_class()}",
        f"--additional-config={json.dumps(told)}",
        "--disable-fastapi-docs",
        "--middleware=nnsight_lab.server.middleware.ServedGuard",
    ]
    if any(flag.split("=")[0] == "--scheduler-cls" for flag in flags):
        # Another scheduler cuts prompts that blocks read.
        own.append("--no-enable-chunked-prefill")
    else:
        own.append(f"--scheduler-cls={SCHEDULER}")
        prompts_cut()
    if settings.fair:
        own.append("--scheduling-policy=priority")
    if settings.sleep_after_s is not None:
        if on_cpu:
            raise ServeRefused(
                "--sleep-after frees memory of a GPU, by vLLM's sleep mode; this engine runs on the CPU."
            )
        own.append("--enable-sleep-mode")
    own += replaying.flags(flags, on_cpu=on_cpu)
    if not any(flag.split("=")[0] == "--served-model-name" for flag in flags):
        own.append(f"--served-model-name={model}")
    return [f"--model={models.resolve(model)}", *own, *flags]


def prepare(settings: Settings, environment: MutableMapping[str, str]) -> None:
    """What vLLM reads from the environment."""
    settings.leave()
    take(environment)
    # The engine's processes follow this one, and are known for whose they are; a kept one has its mark.
    if keeping.taken(environment) is None:
        environment[ENGINE_ENV] = f"served-{os.getpid()}"
        environment.pop(LOG_ENV, None)
    environment[OWNER_ENV] = processes.this_owner()
    stopper.prepare(environment)
    # A dead engine is started again by ours; vLLM would end the server.
    environment["VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"] = "1"
    environment.update(processes.KEEP_MARKS)
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is None or "nnsight_lab" not in plugins.split(","):
        environment["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "nnsight_lab"]))
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")


def run(model: str, flags: Sequence[str], settings: Settings) -> None:
    """Serve until a signal ends it.

    Raises:
        ServeRefused: It cannot run like that.
        EngineDied: The engine died too often to be started again.
    """
    # Before nnsight, which puts a method on every object that anyio's backend then refuses.
    import anyio._backends._asyncio  # noqa: F401

    if not entry_points(group="vllm.endpoint_plugins", name="nnsight_lab"):
        raise ServeRefused("This package is not installed: pip install nnsight-lab (or pip install -e .).")
    if not settings.hub:
        settings.identity()  # what is wrong with a token is said before a model is loaded
    homecoming.reclaim()
    spill = jailing.spill_folder(settings.jail_uid)
    prepare(settings, os.environ)
    keeping.surroundings(flags)
    try:
        _serve(model, flags, settings, spill)
    finally:
        stopper.Stopper().tidy()
        keeping.over()
    if CONDITION.failed:
        raise EngineDied(CONDITION.failed)


def _serve(model: str, flags: Sequence[str], settings: Settings, spill: Path | None) -> None:
    import uvloop

    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # where older versions have them
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="nnsight-lab serve"))
    replaying.surroundings(os.environ, flags, on_cpu=current_platform.is_cpu())
    parsed: Any = parser.parse_args(arguments(model, flags, settings, spill))
    needs_ray(vars(parsed))
    vars(parsed).update(executor(vars(parsed)))
    validate_parsed_serve_args(parsed)
    shares = cpus_of_ranks(vars(parsed))
    if shares is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = shares
    uvloop.run(run_server(parsed))


def users_of(tokens: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Names by token, of a token file's ``{"name": "token"}`` and a single user's token."""
    users = {value: name for name, value in tokens.items()}
    if token is not None:
        users[token] = "*owner"
    return users

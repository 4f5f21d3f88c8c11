"""What `nnsight-lab serve` runs: vLLM's own OpenAI server, with this package's worker and routes.

The settings travel to the server's plugin in one environment variable, which is taken off before any
process of the engine is born: a block must find no token there.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import Any

from nnsight_lab.engine import homecoming, models, processes
from nnsight_lab.engine.model import worker_class
from nnsight_lab.errors import ServeRefused
from nnsight_lab.server import keeping
from nnsight_lab.server.identity import Hub, Identity, Owner, Tokens, User
from nnsight_lab.server.limits import Limits
from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, OWNER_ENV, SAVES_CONFIG

SETTINGS_ENV = "NNSIGHT_LAB_SERVE"
LEVELS = ("solo", "team")
_SECRETS = (SETTINGS_ENV, "JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "VLLM_API_KEY", "NNSIGHT_LAB_TOKEN")
#: Answers of the settings that were taken off the environment.
_taken: dict[str, str] = {}


@dataclass(frozen=True)
class Settings:
    """How a server is run.

    Attributes:
        level: ``solo`` or ``team``.
        users: Names by token, those of admins with a ``*`` before; empty where a hub or a socket tells.
        hub: Whether a JupyterHub tells who users are.
        admins: Hub groups whose members may publish.
        prefix: Where the service lies in the hub.
        limits: Each user's.
    """

    level: str = "team"
    users: dict[str, str] = field(default_factory=dict)
    hub: bool = False
    admins: tuple[str, ...] = ()
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)

    def into(self, environment: MutableMapping[str, str]) -> None:
        """Leave them for the plugin."""
        environment[SETTINGS_ENV] = json.dumps(asdict(self))

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> Settings:
        """Those that were left, taken off together with every other secret.

        Raises:
            ServeRefused: There are none: the plugin was loaded by something else than `nnsight-lab serve`.
        """
        for name in _SECRETS:
            if name in environment:
                _taken[name] = environment.pop(name)
        if SETTINGS_ENV not in _taken:
            raise ServeRefused("The server's plugin is loaded by `nnsight-lab serve` only.")
        told = json.loads(_taken[SETTINGS_ENV])
        return cls(**{**told, "admins": tuple(told["admins"]), "limits": Limits(**told["limits"])})

    def identity(self) -> Identity:
        """How users are told apart."""
        if self.hub:
            from jupyterhub.services.auth import HubAuth  # only a hub's service has it

            return Hub(HubAuth(api_token=_taken["JUPYTERHUB_API_TOKEN"]), frozenset(self.admins))
        if not self.users:
            return Owner()
        return Tokens(
            {token: User(name.removeprefix("*"), name.startswith("*")) for token, name in self.users.items()}
        )


def arguments(model: str, flags: Sequence[str]) -> list[str]:
    """VLLM's arguments for a server in which blocks run.

    Args:
        model: As for `nnsight_lab.start`.
        flags: The user's own, in vLLM's words; they win.
    """
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    own = [
        f"--worker-cls={worker_class()}",
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        f"--additional-config={json.dumps({SAVES_CONFIG: homecoming.settings(secrets.token_hex(6), {})})}",
        "--disable-fastapi-docs",
        "--middleware=nnsight_lab.server.middleware.ServedGuard",
    ]
    if current_platform.is_cpu():
        own.append("--enforce-eager")
    if not any(flag.split("=")[0] == "--served-model-name" for flag in flags):
        own.append(f"--served-model-name={model}")
    return [f"--model={models.resolve(model)}", *own, *flags]


def prepare(settings: Settings, environment: MutableMapping[str, str]) -> None:
    """What vLLM reads from the environment."""
    settings.into(environment)
    # The engine's processes follow this one, and are known for whose they are; a kept one has its mark.
    if keeping.taken(environment) is None:
        environment[ENGINE_ENV] = f"served-{os.getpid()}"
        environment.pop(LOG_ENV, None)
    environment[OWNER_ENV] = processes.this_owner()
    environment.update(processes.KEEP_MARKS)
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is None or "nnsight_lab" not in plugins.split(","):
        environment["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "nnsight_lab"]))
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")


def run(model: str, flags: Sequence[str], settings: Settings) -> None:
    """Serve until a signal ends it."""
    # Before nnsight, which puts a method on every object that anyio's backend then refuses.
    import anyio._backends._asyncio  # noqa: F401

    if not entry_points(group="vllm.endpoint_plugins", name="nnsight_lab"):
        raise ServeRefused("This package is not installed: pip install nnsight-lab (or pip install -e .).")
    if not settings.hub:
        settings.identity()  # what is wrong with a token is said before a model is loaded
    homecoming.reclaim()
    prepare(settings, os.environ)
    keeping.surroundings(flags)
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="nnsight-lab serve"))
    parsed: Any = parser.parse_args(arguments(model, flags))
    validate_parsed_serve_args(parsed)
    try:
        uvloop.run(run_server(parsed))
    finally:
        keeping.over()


def users_of(tokens: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Names by token, of a token file's ``{"name": "token"}`` and a single user's token."""
    users = {value: name for name, value in tokens.items()}
    if token is not None:
        users[token] = "*owner"
    return users

"""``nnsight-lab serve``: an engine that many kernels and OpenAI clients share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from nnsight_lab.errors import ServeRefused, nearest

_TOKEN_ENV = "NNSIGHT_LAB_TOKEN"
_LEAST = 16
#: What `--example` prints: files of ``nnsight_lab/server/examples``.
EXAMPLES = {
    "hub": "jupyterhub_config.py",
    "systemd": "nnsight-lab.service",
    "kubernetes": "zero_to_jupyterhub.yaml",
    "docker": "compose.yaml",
}
_LIMITS = (
    "what one user may have: requests, running, tokens_per_minute, max_tokens, n, edits, block_bytes, "
    "blocks_bytes, body_bytes, body_s, json_bytes, saved_bytes, kept_bytes, kept_s, parked_bytes, parked_s"
)


def add_parser(sub: Any) -> None:
    """Add the subcommand."""
    parser = sub.add_parser(
        "serve",
        help="serve a model to kernels and OpenAI clients",
        description="Serves a model with vLLM's own OpenAI server: notebooks attach with "
        "lab.attach(URL), OpenAI clients use it as any other. Flags that are not listed here are "
        "vLLM's own, as in nnsight-lab serve demo --port 8000 --max-model-len 2048.",
        epilog=f"One user's token is read from ${_TOKEN_ENV}; it is never an argument, which others can see.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="'demo', a Hugging Face id, or a path")
    parser.add_argument(
        "--level",
        choices=("solo", "team", "strict"),
        default="team",
        help="solo: one user; team: users who trust each other; strict: edits are data, no user's code runs",
    )
    parser.add_argument(
        "--jail",
        choices=("auto", "on", "off"),
        help="shut the workers in once the model is loaded: auto, as far as the machine allows (the default "
        "but for solo); on, or not at all; off",
    )
    parser.add_argument(
        "--jail-user", metavar="USER", help="whose the workers become where this is root (nobody)"
    )
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help='JSON: {"name": "token"}; *name may publish'
    )
    parser.add_argument(
        "--hub", action="store_true", help="users are those of the JupyterHub whose service this is"
    )
    parser.add_argument(
        "--example", action=Example, help="print a file to begin with, and nothing else", choices=EXAMPLES
    )
    parser.add_argument(
        "--admin-group",
        action="append",
        default=[],
        metavar="GROUP",
        help="with --hub: its members may publish",
    )
    parser.add_argument(
        "--audit", type=Path, metavar="FILE", help="who did what and what was refused, a line of JSON each"
    )
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=N", help=_LIMITS)
    parser.add_argument(
        "--metrics-token", type=Path, metavar="FILE", help="a token in a file that may read /metrics, no more"
    )
    parser.add_argument(
        "--drain-s", type=seconds, default=30.0, metavar="S", help="requests may go on so long after SIGTERM"
    )
    parser.add_argument(
        "--step-limit",
        type=seconds,
        default=60.0,
        metavar="S",
        help="a block that holds a step up longer is ended",
    )
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="of an engine that died, within ten minutes"
    )
    parser.add_argument(
        "--share-prefixes",
        action="store_true",
        help="users are served what others' prompts left in the prefix cache: faster where many begin alike, "
        "and the time of an answer tells whether somebody else asked the same",
    )
    parser.add_argument(
        "--sleep-after",
        type=seconds,
        metavar="S",
        help="an engine idle that long frees its GPU until it is asked",
    )
    parser.add_argument(
        "--keep",
        nargs="?",
        const="main",
        metavar="NAME",
        help="in the background, for your own notebooks only",
    )
    parser.add_argument(
        "--idle-minutes",
        type=float,
        metavar="N",
        help="with --keep: ends after so long without anybody (240)",
    )
    parser.set_defaults(run=run, takes_more=True)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    from nnsight_lab.server.audit import audit
    from nnsight_lab.server.command import Settings, users_of
    from nnsight_lab.server.command import run as serve
    from nnsight_lab.server.environment import take
    from nnsight_lab.server.hub import hub_service
    from nnsight_lab.server.jailing import Jailer, jailer

    if arguments.keep is not None:
        from nnsight_lab.cli.keep import keep

        return keep(arguments)
    if arguments.idle_minutes is not None:
        raise ServeRefused("--idle-minutes is of an engine that is kept: add --keep.")
    flags: list[str] = arguments.more
    users = users_of(_read(arguments.tokens), os.environ.get(_TOKEN_ENV))
    socket = any(flag.split("=")[0] == "--uds" for flag in flags)
    if not (users or arguments.hub or socket):
        raise ServeRefused(
            f"Nobody could be told apart: set ${_TOKEN_ENV} for one user, give --tokens FILE for several, "
            "--hub for those of a JupyterHub, or --uds PATH for a Unix socket that only you can open."
        )
    if arguments.hub and (arguments.tokens or socket):
        raise ServeRefused("--hub tells users by their JupyterHub tokens: leave --tokens and --uds out.")
    hub = hub_service(os.environ) if arguments.hub else None
    take(os.environ)
    if socket:
        _private(flags)
    jail = arguments.jail or ("off" if arguments.level == "solo" else "auto")
    if arguments.audit is not None:
        audit.open(arguments.audit)  # what is wrong with it is said before a model is loaded
        audit.close()
    found = Jailer() if jail == "off" else jailer(arguments.jail_user)
    settings = Settings(
        audit="" if arguments.audit is None else str(arguments.audit.absolute()),
        jail=jail,
        jail_uid=found.uid,
        jail_no_user=found.why,
        level=arguments.level,
        users=users,
        hub=hub.name if hub else "",
        admins=tuple(arguments.admin_group),
        limits=_limits(arguments.limit),
        metrics_token=_metrics_token(arguments.metrics_token),
        drain_s=arguments.drain_s,
        step_limit_s=arguments.step_limit,
        restarts=arguments.restarts,
        sleep_after_s=arguments.sleep_after,
        prefix=hub.prefix if hub else "",
        share_prefixes=arguments.share_prefixes,
    )
    serve(arguments.model, flags, settings)
    return 0


def seconds(text: str) -> float:
    """A number of seconds, from 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _metrics_token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ServeRefused(f"{path} cannot be read: {error}") from None
    if len(token) < _LEAST:
        raise ServeRefused(f"{path} should hold a token of at least {_LEAST} characters, and nothing else.")
    return token


class Example(argparse.Action):
    """Prints one of the files that come with the package."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, __: str | None = None) -> None:
        """Print it, and end."""
        sys.stdout.write((Path(__file__).parents[1] / "server" / "examples" / EXAMPLES[values]).read_text())
        parser.exit()


def _private(flags: list[str]) -> None:
    """See that only this user reaches the socket: whoever does is taken for its owner.

    Its folder is what keeps others out. A socket's own mode does not everywhere, and is set only after it can
    be connected to.
    """
    at = next(index for index, flag in enumerate(flags) if flag.split("=")[0] == "--uds")
    path = Path(flags[at].partition("=")[2] or (flags[at + 1] if at + 1 < len(flags) else ""))
    folder = path.absolute().parent
    try:
        found = folder.stat()
    except OSError:
        raise ServeRefused(f"There is no folder {folder}: mkdir -m 700 {folder}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServeRefused(
            f"{folder} can be entered by others, and whoever reaches the socket is taken for you: "
            f"mkdir -m 700 a folder of its own for it."
        )


def _limits(given: list[str]) -> Any:
    from nnsight_lab.server.limits import Limits

    known = {one.name for one in fields(Limits)}
    found = {}
    for one in given:
        name, _, value = one.partition("=")
        if name not in known or not value.isdigit():
            raise ServeRefused(f"--limit {one!r} is not NAME=N.{nearest(name, known)}")
        found[name] = int(value)
    return Limits(**found)


def _read(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ServeRefused(f"{path} cannot be read as JSON: {error}") from None
    if type(found) is not dict or not all(type(value) is str for value in found.values()):
        raise ServeRefused(f'{path} should hold {{"name": "token"}} and nothing else.')
    return found

"""``nnsight-lab serve``: an engine that many kernels and OpenAI clients share."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from nnsight_lab.errors import ServeRefused, nearest

_TOKEN_ENV = "NNSIGHT_LAB_TOKEN"
_LIMITS = (
    "what one user may have: requests, edits, block_bytes, body_bytes, saved_bytes, kept_bytes, kept_s, "
    "max_tokens"
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
    parser.add_argument("--level", choices=("solo", "team"), default="team", help="how users are kept apart")
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help='JSON: {"name": "token"}; *name may publish'
    )
    parser.add_argument("--hub", action="store_true", help="users are those of the JupyterHub it serves")
    parser.add_argument("--admin-group", action="append", default=[], metavar="GROUP", help="may publish")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=N", help=_LIMITS)
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
    from nnsight_lab.server.command import Settings, users_of
    from nnsight_lab.server.command import run as serve

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
    if arguments.hub and "JUPYTERHUB_API_TOKEN" not in os.environ:
        raise ServeRefused("--hub needs JUPYTERHUB_API_TOKEN and JUPYTERHUB_API_URL, as a service has them.")
    if socket:
        _private(flags)
    settings = Settings(
        level=arguments.level,
        users=users,
        hub=arguments.hub,
        admins=tuple(arguments.admin_group),
        limits=_limits(arguments.limit),
        prefix=os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "") if arguments.hub else "",
    )
    serve(arguments.model, flags, settings)
    return 0


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

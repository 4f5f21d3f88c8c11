"""``nnsight-lab admin``: what everybody has on a shared engine, and an end to it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from nnsight_lab.errors import ServerError
from nnsight_lab.wire.serving import PREFIX

_TOKEN_ENV = "NNSIGHT_LAB_TOKEN"
_LISTED = {
    "leases": ("owner", "id", "expires_s", "calls", "edits"),
    "edits": ("owner", "id", "name", "on", "published", "in_flight", "bytes"),
    "requests": ("owner", "id", "state", "for_s", "prompt_tokens", "generated_tokens", "blocks"),
}


def add_parser(sub: Any) -> None:
    """Add the subcommand."""
    parser = sub.add_parser(
        "admin",
        help="list and end what users have on a shared engine",
        description="Lists everybody's leases, edits and requests on a server of `nnsight-lab serve`, "
        "ends them, and publishes edits. IDs are those of the lists.",
        epilog=f"The token of an admin is read from --token-file or ${_TOKEN_ENV}; it is never an argument, "
        "which others can see.",
        allow_abbrev=False,  # --token would be --token-file, and a token stand in the list of processes
    )
    parser.add_argument("url", metavar="URL", help="as for %%engine attach: http://host:port, or unix:/path")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token and nothing else")
    act = parser.add_subparsers(title="what to do", metavar="ACTION", required=True, dest="action")
    for what in _LISTED:
        one = act.add_parser(what, help=f"list {what}")
        one.add_argument("--json", action="store_true", help="as JSON, for programs")
    _with_ids(act, "end-lease", "OWNER LEASE", "abort a kernel's calls and clear its edits")
    _with_ids(act, "end-edit", "OWNER EDIT", "clear an edit")
    _with_ids(act, "end-request", "REQUEST", "abort a request")
    _with_ids(act, "publish", "OWNER EDIT", "let everybody's requests run an edit")
    _with_ids(act, "unpublish", "OWNER EDIT", "let its owner's only")
    parser.set_defaults(run=run)


def _with_ids(act: Any, name: str, words: str, said: str) -> None:
    one = act.add_parser(name, help=said)
    for word in words.split():
        one.add_argument(word.lower(), metavar=word)


def run(arguments: argparse.Namespace) -> int:
    """Do it.

    Raises:
        ServerError: The server does not answer, or refuses.
    """
    asked = _asker(arguments.url, _token(arguments.token_file))
    action = arguments.action
    if action in _LISTED:
        found = asked("GET", action)
        print(json.dumps(found, indent=2) if arguments.json else _table(found, _LISTED[action]))
        return 0
    if action == "end-request":
        asked("DELETE", f"requests/{quote(arguments.request, safe='')}")
        print(f"Request {arguments.request} is aborted.")
        return 0
    kind = "lease" if action == "end-lease" else "edit"
    thing = getattr(arguments, kind)
    path = f"{kind}s/{quote(arguments.owner, safe='')}/{quote(thing, safe='')}"
    if action.startswith("end-"):
        asked("DELETE", path)
        print(f"{kind.capitalize()} {thing} of {arguments.owner} is ended.")
    else:
        asked("PATCH", path, json={"published": action == "publish"})
        print(f"Edit {thing} of {arguments.owner} is {action}ed.")
    return 0


def _token(path: Path | None) -> str:
    if path is None:
        return os.environ.get(_TOKEN_ENV, "")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ServerError(f"The token cannot be read: {error}.") from None


def _asker(url: str, token: str) -> Callable[..., Any]:
    import httpx  # not for `--help`

    from nnsight_lab.engine.remote_driver import refused, unreachable

    split = urlsplit(url)
    socket = split.path if split.scheme == "unix" else None
    if split.scheme not in ("http", "https", "unix"):
        raise ServerError(f"{url!r} is no address: http://host:port, or unix:/path.")
    base = "http://localhost" if socket else url.rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def asked(method: str, path: str, **more: Any) -> Any:
        try:
            with httpx.Client(
                headers=headers, transport=httpx.HTTPTransport(uds=socket), trust_env=False, timeout=30
            ) as http:
                answer = http.request(method, f"{base}{PREFIX}/admin/{path}", **more)
        except httpx.HTTPError as error:
            raise unreachable(url, error) from None
        if answer.status_code == httpx.codes.NOT_FOUND and "Not served here" in answer.text:
            raise ServerError(f"{url} has no such thing for you: the token is not an admin's.", status=404)
        if answer.is_error:
            raise refused(url, answer)
        return answer.json() if answer.content else None

    return asked


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    if not rows:
        return "(none)"
    shown = [[_cell(row[name]) for name in columns] for row in rows]
    titles = [name.replace("_", " ") for name in columns]
    widths = [max(map(len, column)) for column in zip(titles, *shown, strict=True)]
    lines = [titles, *shown]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if type(value) is bool else str(value)

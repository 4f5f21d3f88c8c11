"""``nnsight-lab serve MODEL --keep``: a kept engine from a terminal, which is free again once it is up.

It is the one that ``%engine start MODEL --keep`` starts, so its flags become the options of a record: a
kernel that asks for the same finds it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from typing import Any

from nnsight_lab.errors import ServeRefused


def keep(arguments: argparse.Namespace) -> int:
    """Start it, or find it, and say how it is attached to."""
    for flag, given in (
        ("--tokens", arguments.tokens),
        ("--hub", arguments.hub),
        ("--admin-group", arguments.admin_group),
        ("--limit", arguments.limit),
    ):
        if given:
            raise ServeRefused(
                f"{flag} is for others' requests, and a kept engine is yours alone: leave it out."
            )
    options = options_of(arguments.more)
    for name in ("uds", "host", "port"):
        if name in options:
            raise ServeRefused(f"--{name} is not for a kept engine: it listens where your kernels find it.")
    import nnsight_lab as lab

    idle = {} if arguments.idle_minutes is None else {"idle_minutes": arguments.idle_minutes}
    engine = lab.start(arguments.model, name=arguments.keep, keep=True, **idle, **options)
    line = engine.attach_line()
    lab.detach(engine.name)
    print(f"{line}\nEnd it: nnsight-lab kept --stop {arguments.keep}", file=sys.stdout)
    return 0


def options_of(flags: Sequence[str]) -> dict[str, Any]:
    """Engine options of vLLM's flags, in whatever form they are written.

    Raises:
        ServeRefused: A word belongs to no flag.
    """
    found: dict[str, Any] = {}
    words = list(flags)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ServeRefused(f"{flag!r} is no flag of vLLM's, and belongs to none.")
        name = flag[2:].replace("-", "_")
        if equals:
            found[name] = _value(value)
            continue
        many = []
        while words and not words[0].startswith("--"):
            many.append(_value(words.pop(0)))
        if many:
            found[name] = many[0] if len(many) == 1 else many
        else:
            found[name.removeprefix("no_")] = not name.startswith("no_")
    return found


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word

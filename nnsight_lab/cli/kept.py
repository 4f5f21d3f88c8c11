"""``nnsight-lab kept``: the engines that this user keeps, and their end, without a kernel."""

from __future__ import annotations

import argparse
import time
from typing import Any


def add_parser(sub: Any) -> None:
    """Add the subcommand."""
    parser = sub.add_parser(
        "kept",
        help="list the engines that you keep, or stop one",
        description="Lists the engines that %%engine start MODEL --keep, lab.start(…, keep=True) and "
        "nnsight-lab serve MODEL --keep started, and that go on without a kernel; ends one of them.",
    )
    parser.add_argument("--stop", metavar="NAME", help="end that one, for every kernel that has it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List them, or stop one."""
    from nnsight_lab.engine import kept

    if arguments.stop is not None:
        from nnsight_lab.engine.ending import report

        print(report(arguments.stop, kept.chosen(arguments.stop), time.monotonic()))
        return 0
    known = kept.all_kept()
    for one in known:
        print(f"{one}\n    {one.attach_line}")
    if not known:
        print("You keep no engine here: nnsight-lab serve MODEL --keep, or %engine start MODEL --keep.")
    return 0

"""``nnsight-lab``: one program, a subcommand per module.

A subcommand's module has ``add_parser(sub)``, which adds its parser and sets ``run``: a function from the
parsed arguments to an exit code. What it needs beyond the standard library it imports when it runs, so that
``--help`` and a typing mistake answer at once (torch alone takes seconds to import).

Exit codes: 0 it worked, 1 it did not (one line on stderr says why), 2 the command line is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from nnsight_lab.cli import bench, demo, doctor, export, freeze, kept, model, serve
from nnsight_lab.errors import LabError

SUBCOMMANDS = (doctor, demo, model, serve, kept, export, freeze, bench)


def build_parser() -> argparse.ArgumentParser:
    """The whole tree of arguments."""
    parser = argparse.ArgumentParser(
        prog="nnsight-lab",
        description="Look inside language models at vLLM speed, from a notebook.",
        epilog="Help for one command: nnsight-lab COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"nnsight-lab {_version()}")
    sub = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for subcommand in SUBCOMMANDS:
        subcommand.add_parser(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of this process by default.

    Returns:
        The exit code.
    """
    parser = build_parser()
    arguments, more = parser.parse_known_args(argv)
    if more and not getattr(arguments, "takes_more", False):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.more = more
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader that left early can still be answered
    except LabError as error:
        print(f"nnsight-lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nnsight-lab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `| head` has read enough. Python would complain once more on closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _version() -> str:
    try:
        return metadata.version("nnsight-lab")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "(not installed)"

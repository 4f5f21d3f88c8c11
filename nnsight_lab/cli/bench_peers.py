"""``nnsight-lab bench peers``: the same works on us, on plain vLLM and on every peer."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnsight_lab.errors import BenchRefused, nearest


def add_parser(works: Any, say: Callable[[str], None], option: Callable[[str], tuple[str, Any]]) -> None:
    parser: argparse.ArgumentParser = works.add_parser(
        "peers",
        help="us, plain vLLM and every peer on the same works (a quarter of an hour and more)",
        description="Run the same works on nnsight-lab, plain vLLM, nnsight alone, vllm-lens, HF "
        "transformers with hooks and TransformerLens, each in a process and, where it must, an environment "
        "of its own, one after another. Values are compared with HF's; the speed of wrong ones is not told.",
    )
    parser.add_argument(
        "--setup", action="store_true", help="install the peers' environments, and measure nothing"
    )
    parser.add_argument(
        "--model", default="demo", help="demo, a folder, or a folder with only a configuration"
    )
    parser.add_argument("--peers", metavar="A,B", help="only these (default: all)")
    parser.add_argument("--works", metavar="A,B", help="only these, such as w1_steer (default: all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each work (default: 3)")
    parser.add_argument(
        "--scale", type=int, default=1, metavar="N", help="so many times fewer prompts in W1 and W2"
    )
    parser.add_argument("--dtype", default="auto", help="default: bfloat16 on CUDA, float32 elsewhere")
    parser.add_argument(
        "--limit-s", type=float, default=1800, metavar="S", help="of one peer (default: 1800)"
    )
    parser.add_argument(
        "--work-limit-s",
        type=float,
        default=120,
        metavar="S",
        help="a longer work is told, not run (default: 120)",
    )
    parser.add_argument("--once", action="store_true", help="do not measure plain vLLM again at the end")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="default: in the user's cache")
    parser.add_argument(
        "--packages", action="append", default=[], metavar="PEER=DIR",
        help="a folder of that peer's packages (pip install --target), used with this Python",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the peers print")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="keep what each peer told; who is done there is not run again",
    )
    parser.add_argument("--kept", action="store_true", help="run nobody: tell what --folder has")
    parser.add_argument("--note", default="", metavar="TEXT", help="what to say of the machine in the table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="add each row to a file as it comes")
    parser.add_argument("--figure", type=Path, metavar="FILE", help=".html, .png or .json")
    parser.add_argument("--table", type=Path, metavar="FILE", help=".md")
    parser.add_argument(
        "--from", dest="found", type=Path, metavar="FILE", help="of an earlier --json; measures nothing"
    )
    parser.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    parser.set_defaults(run=lambda arguments: run(arguments, say, option))


def run(
    arguments: argparse.Namespace, say: Callable[[str], None], option: Callable[[str], tuple[str, Any]]
) -> int:
    from nnsight_lab.bench.peers import environments, works  # local, as of every work

    packages = dict(_packages(word) for word in arguments.packages)
    places = environments.Environments(arguments.environments, packages)
    peers = environments.chosen(arguments.peers)
    if arguments.setup:
        places.setup(peers, say)
        return 0
    if arguments.kept and not arguments.folder:
        raise BenchRefused("--kept tells what a folder has: say which with --folder DIR")
    if arguments.figure:
        from nnsight_lab.bench.peers.figure import check  # plotly

        check(arguments.figure)
    if arguments.found:
        try:
            found = json.loads(arguments.found.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchRefused(f"{arguments.found} is not what --json printed: {error}") from None
    else:
        some = _some(works.works(max(1, arguments.scale)), arguments.works)
        # Whoever ends this program, as `timeout` does, ends the running peer too.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            found = _measured(arguments, places, peers, some, say, option)
        finally:
            signal.signal(signal.SIGTERM, before)
    _shown(arguments, found)
    return 0


def _measured(
    arguments: argparse.Namespace, places: Any, peers: Any, works: Any, say: Any, option: Any
) -> dict[str, Any]:
    from nnsight_lab.bench.peers.report import Plan, report
    from nnsight_lab.engine import models

    only_configured = Path(arguments.model).is_dir()
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        model=models.resolve(arguments.model, dummy=only_configured),
        peers=peers,
        works=works,
        environments=places,
        rounds=arguments.rounds,
        dtype=arguments.dtype,
        options=dict(option(word) for word in arguments.option),
        limit_s=arguments.limit_s,
        work_limit_s=arguments.work_limit_s,
        again=not arguments.once,
        logs=arguments.logs,
        folder=arguments.folder,
        run=not arguments.kept,
        note=arguments.note,
    )

    def tell(row: dict[str, Any]) -> None:
        if arguments.rows:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return report(plan, say, tell)


def _shown(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    from nnsight_lab.bench.peers import table

    if arguments.table:
        # What is written where says nothing about what was measured.
        command = shlex.join(["nnsight-lab", "bench", "peers", *_settings(arguments)])
        drawn = arguments.figure
        beside = (
            drawn and drawn.suffix == ".png" and drawn.resolve().parent == arguments.table.resolve().parent
        )
        page = table.markdown(found, command, drawn.name if beside else "")
        arguments.table.write_text(page, encoding="utf-8")
    if arguments.kept and not arguments.folder:
        raise BenchRefused("--kept tells what a folder has: say which with --folder DIR")
    if arguments.figure:
        from nnsight_lab.bench.peers.figure import write

        write(found, arguments.figure)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(table.terminal(found))
    sys.stdout.flush()


def _settings(arguments: argparse.Namespace) -> list[str]:
    said = [f"--model={arguments.model}"] if arguments.model != "demo" else []
    said += [f"--scale={arguments.scale}"] if arguments.scale != 1 else []
    said += [f"--rounds={arguments.rounds}"] if arguments.rounds != 3 else []
    said += [f"--{name}={given}" for name in ("peers", "works") if (given := getattr(arguments, name))]
    return [*said, *arguments.option]


def _packages(word: str) -> tuple[str, Path]:
    from nnsight_lab.bench.peers.environments import peers

    name, equals, folder = word.partition("=")
    if name not in peers():
        raise BenchRefused(f"{name!r} is not a peer.{nearest(name, peers())}")
    if not equals or not Path(folder).is_dir():
        raise BenchRefused(f"--packages {word}: write PEER=DIR, where DIR is a folder")
    return name, Path(folder).resolve()


def _some(every: list[Any], names: str | None) -> list[Any]:
    if not names:
        return every
    known = {work.name for work in every}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise BenchRefused(f"{name!r} is not a work.{nearest(name, known)}")
    # With what they are compared with: a ratio is to the same prompts with nothing asked.
    beside = {work.plain for work in every if work.name in asked}
    return [work for work in every if work.name in asked or work.name in beside]

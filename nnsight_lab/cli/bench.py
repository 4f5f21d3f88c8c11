"""``nnsight-lab bench``: measure, side by side with the peer in one run."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

from nnsight_lab.cli import bench_peers
from nnsight_lab.errors import CellUsageError


def add_parser(sub: Any) -> None:
    parser: argparse.ArgumentParser = sub.add_parser(
        "bench",
        help="measure against plain vLLM and the peers",
        description="Measure, side by side with the peer in one run, as ratios.",
    )
    works = parser.add_subparsers(title="works", metavar="WORK", required=True)
    engine = works.add_parser(
        "engine",
        help="what the engine costs over plain vLLM (a few minutes)",
        description="Generate and trace 64 prompts on our engine, on plain vLLM and on stock nnsight, in "
        "interleaved rounds; the figures are medians of the ratios within a round.",
    )
    engine.add_argument("--model", default="demo", help="as for `%%engine start` (default: demo)")
    engine.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    engine.add_argument("--rounds", type=int, default=7, metavar="N")
    engine.add_argument("--no-nnsight", action="store_true", help="leave stock nnsight out")
    engine.add_argument(
        "--speed",
        action="store_true",
        help="beside plain vLLM with its own defaults: CUDA graphs and compiled code (default on CUDA)",
    )
    engine.add_argument(
        "--scale", type=int, default=1, metavar="N", help="with --speed: so many times fewer prompts"
    )
    engine.add_argument(
        "--table", type=Path, metavar="FILE", help="with --speed: .md, with date and versions"
    )
    engine.add_argument("--json", action="store_true", help="print one JSON object")
    engine.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    engine.set_defaults(run=run_engine)

    start = works.add_parser(
        "start",
        help="what a start of an engine takes beside plain vLLM's (some minutes)",
        description="Start our engine and plain vLLM in new processes, in turns, and each once more in the "
        "same process; the figures are medians of the ratios within a round, imports included.",
    )
    start.add_argument("--model", default="demo", help="as for `%%engine start` (default: demo)")
    start.add_argument("--mode", choices=("sync", "async", "both"), default="both")
    start.add_argument("--rounds", type=int, default=3, metavar="N")
    start.add_argument("--json", action="store_true", help="print one JSON object")
    start.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    start.set_defaults(run=run_start)

    saves = works.add_parser(
        "saves",
        help="what bringing saves home costs, beside nnsight's own road (some minutes)",
        description="Save all residual streams of 64 prompts of 256 tokens on our engine and on stock "
        "nnsight, in interleaved rounds; the road home is timed from asking the workers to having values.",
    )
    saves.add_argument("--model", default="demo", help="as for `%%engine start` (default: demo)")
    saves.add_argument("--mode", choices=("sync", "async"), default="sync")
    saves.add_argument("--prompts", type=int, default=64, metavar="N")
    saves.add_argument("--tokens", type=int, default=256, metavar="N")
    saves.add_argument("--rounds", type=int, default=5, metavar="N")
    saves.add_argument(
        "--few", type=int, default=8, metavar="N", help="the road home is timed over so many, in both"
    )
    saves.add_argument("--no-nnsight", action="store_true", help="leave stock nnsight out")
    saves.add_argument("--json", action="store_true", help="print one JSON object")
    saves.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    saves.set_defaults(run=run_saves)

    soak = works.add_parser(
        "soak",
        help="whether anything grows over many requests (some minutes)",
        description="Run many short prompts under an edit that saves every residual stream, and look at the "
        "memory that every process cannot give back and at the shared memory; the first thousand requests do "
        "not count.",
    )
    soak.add_argument("--model", default="demo", help="as for `%%engine start` (default: demo)")
    soak.add_argument("--mode", choices=("sync", "async"), default="sync")
    soak.add_argument("--requests", type=int, default=10_000, metavar="N")
    soak.add_argument("--no-save", action="store_true", help="without the edit: what is vLLM's own growth")
    soak.add_argument("--json", action="store_true", help="print one JSON object")
    soak.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    soak.set_defaults(run=run_soak)

    widgets = works.add_parser(
        "widgets",
        help="what looking at a large tensor costs in a browser (a minute)",
        description="Draw a random tensor in a real JupyterLab in a headless browser, zoom into it and pan.",
    )
    widgets.add_argument("--rows", type=int, default=50_000, metavar="N")
    widgets.add_argument("--columns", type=int, default=4_096, metavar="N")
    widgets.add_argument("--pans", type=int, default=60, metavar="N")
    widgets.add_argument("--dtype", default="float32", help="as torch names it (default: float32)")
    widgets.add_argument("--json", action="store_true", help="print one JSON object")
    widgets.set_defaults(run=run_widgets)

    panel = works.add_parser(
        "panel",
        help="what looking at JupyterLab's panel costs a request (three minutes)",
        description="Generate in a real kernel while a page looks at the panel, and while none does, in "
        "interleaved rounds; the figures are medians of the ratios within a round.",
    )
    panel.add_argument("--model", default="demo", help="as for `%%engine start` (default: demo)")
    panel.add_argument("--mode", choices=("sync", "async"), default="async")
    panel.add_argument("--prompts", type=int, default=32, metavar="N", help="of one call (default: 32)")
    panel.add_argument("--tokens", type=int, default=24, metavar="N", help="new ones of each (default: 24)")
    panel.add_argument("--rounds", type=int, default=15, metavar="N")
    panel.add_argument("--json", action="store_true", help="print one JSON object")
    panel.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    panel.set_defaults(run=run_panel)

    server = works.add_parser(
        "server",
        help="what a shared engine costs over plain vLLM's server and an engine of one's own (some minutes)",
        description="OpenAI requests to our server and to plain vLLM's in interleaved rounds; traces over "
        "loopback and in process; saves that are fetched, and that are mapped; attaching a new kernel.",
    )
    server.add_argument("--model", default="demo", help="as for `%%engine start` (default: demo)")
    server.add_argument("--prompts", type=int, default=64, metavar="N", help="of one round (default: 64)")
    server.add_argument("--tokens", type=int, default=16, metavar="N", help="new ones of each (default: 16)")
    server.add_argument("--rounds", type=int, default=7, metavar="N")
    server.add_argument("--traces", type=int, default=40, metavar="N", help="single ones (default: 40)")
    server.add_argument("--saves-mb", type=int, default=1000, metavar="N", help="of one request")
    server.add_argument("--json", action="store_true", help="print one JSON object")
    server.add_argument("option", nargs="*", help="vLLM engine options, as name=value")
    server.set_defaults(run=run_server)

    bench_peers.add_parser(works, _say, _option)


def run_engine(arguments: argparse.Namespace) -> int:
    # Local: torch and vLLM, which `--help` should not wait for.
    from nnsight_lab.bench.engine import report
    from nnsight_lab.engine.model import worker_class

    options = dict(_option(word) for word in arguments.option)
    if arguments.speed or worker_class().endswith("LabGPUWorker"):
        return _run_speed(arguments, options)
    modes = ("sync", "async") if arguments.mode == "both" else (arguments.mode,)
    found = report(
        modes,
        model=arguments.model,
        repeat=arguments.rounds,
        nnsight=not arguments.no_nnsight,
        say=_say,
        **options,
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for row in found["rows"]:
        print(f"{row['mode']}: {row['prompts']} prompts x {row['new_tokens']} tokens, {row['rounds']} rounds")
        for name in ("nothing_registered", "trace64", "edit64", "nnsight_trace64"):
            if f"{name}_vs_plain" in row:
                print(f"  {name + ' / plain vLLM':<34} {row[f'{name}_vs_plain']:.3f}")
        print(f"  {'first token, cell above generate':<34} {row['first_token_overhead_ms']:.2f} ms")
    return 0


def run_start(arguments: argparse.Namespace) -> int:
    # Local: what is measured is what it imports.
    from nnsight_lab.bench.start import report

    if arguments.rounds < 1:
        raise CellUsageError("--rounds is at least 1.")
    found = report(
        ("sync", "async") if arguments.mode == "both" else (arguments.mode,),
        model=arguments.model,
        repeat=arguments.rounds,
        say=_say,
        **dict(_option(word) for word in arguments.option),
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for row in found["rows"]:
        print(f"{row['mode']}, {row['rounds']} rounds")
        for name in ("start", "second_start"):
            print(f"  {name.replace('_', ' ') + ' / plain vLLM':<34} {row[f'{name}_vs_plain']:.3f}")
        for name, took in row["phases_s"].items():
            print(f"  {name:<34} {took:.2f} s")
    return 0


def _run_speed(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    # Local: torch and vLLM, which `--help` should not wait for.
    from nnsight_lab import pins
    from nnsight_lab.bench.speed import measure
    from nnsight_lab.bench.speed_table import markdown

    found = measure(
        arguments.model, repeat=arguments.rounds, scale=max(1, arguments.scale), say=_say, **options
    )
    found["versions"] = {"vllm": pins.vllm_version(), "nnsight": pins.version_of("nnsight")}
    if arguments.table:
        command = [
            "nnsight-lab bench engine --speed",
            f"--rounds {arguments.rounds} --scale {arguments.scale}",
        ]
        arguments.table.write_text(markdown(found, " ".join([*command, *arguments.option])), encoding="utf-8")
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        if name.endswith("_vs_plain"):
            print(f"  {name.removesuffix('_vs_plain') + ' / plain vLLM':<34} {value:.3f}")
    return 0


def run_saves(arguments: argparse.Namespace) -> int:
    # Local: torch and vLLM, which `--help` should not wait for.
    from nnsight_lab.bench.saves import measure

    found = measure(
        model=arguments.model,
        mode=arguments.mode,
        count=arguments.prompts,
        tokens=arguments.tokens,
        repeat=arguments.rounds,
        few_count=arguments.few,
        nnsight=not arguments.no_nnsight,
        say=_say,
        **dict(_option(word) for word in arguments.option),
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['prompts']} prompts x {found['tokens']} tokens, {found['saved_gb']} GB saved")
    for name in (
        "call_vs_no_save",
        "last_token_vs_no_save",
        "gb_per_s",
        "slabs_start_s",
        "road_home_gb_per_s",
        "road_home_vs_nnsight",
    ):
        if name in found:
            print(f"  {name:<24} {found[name]}")
    return 0


def run_soak(arguments: argparse.Namespace) -> int:
    # Local: torch and vLLM, which `--help` should not wait for.
    from nnsight_lab.bench.soak import measure

    found = measure(
        model=arguments.model,
        mode=arguments.mode,
        requests=arguments.requests,
        saving=not arguments.no_save,
        say=_say,
        **dict(_option(word) for word in arguments.option),
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(
        f"{found['requests']} requests, {found['requests_per_s']} a second, "
        f"{found['saved_kb_per_request']} kB saved by each; what stays, and grew past the first 1000:"
    )
    for name, grown in found["growth"].items():
        print(f"  {name:<24} {grown['mb']:>8.2f} MB  {grown['bytes_per_request']:>10.1f} bytes a request")
    return 0


def run_widgets(arguments: argparse.Namespace) -> int:
    # Local: anywidget and torch.
    from nnsight_lab.bench.widgets import measure

    found = measure(
        rows=arguments.rows,
        columns=arguments.columns,
        pans=arguments.pans,
        dtype=arguments.dtype,
        say=_say,
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        if isinstance(value, (int, float)):
            print(f"  {name:<18} {value:,}")
    return 0


def run_panel(arguments: argparse.Namespace) -> int:
    # Local: jupyter_client, and what an engine's options are.
    from nnsight_lab.bench.panel import measure

    found = measure(
        arguments.model,
        mode=arguments.mode,
        count=arguments.prompts,
        tokens=arguments.tokens,
        repeat=arguments.rounds,
        say=_say,
        **dict(_option(word) for word in arguments.option),
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['prompts']} prompts x {found['new_tokens']} tokens, {found['rounds']} rounds")
    for name in ("generate", "saving_generate"):
        print(f"  {name + ', panel open / closed':<34} {found[f'{name}_with_panel_vs_without']:.3f}")
    return 0


def run_server(arguments: argparse.Namespace) -> int:
    # Local: torch and vLLM, which `--help` should not wait for.
    from nnsight_lab.bench.server import measure

    found = measure(
        arguments.model,
        count=arguments.prompts,
        tokens=arguments.tokens,
        repeat=arguments.rounds,
        traces=arguments.traces,
        saves_mb=arguments.saves_mb,
        say=_say,
        **dict(_option(word) for word in arguments.option),
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['prompts']} prompts x {found['new_tokens']} tokens, {found['saved_mb']} MB saved")
    for name, value in found.items():
        if isinstance(value, float):
            print(f"  {name:<28} {value}")
    return 0


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _option(word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals or not name.isidentifier():
        raise CellUsageError(f"{word!r} is not an engine option: write name=value, as in dtype=float32.")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text

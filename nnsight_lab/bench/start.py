"""What a start of an engine takes beside plain vLLM's, in phases; and a second start of the same model.

Each engine starts in a new process of its own, which imports vLLM first, as a kernel that has just begun;
then it stops, and starts again in the same process. The floor of a first start is plain vLLM's own: three
processes that import vLLM one after the other (two, where the worker is the engine's own process). What a
second start can be spared are imports here, compiled code and what vLLM caches on the disk; CUDA graphs are
recorded anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import nnsight_lab as lab
from nnsight_lab import pins
from nnsight_lab.engine import importing, models, processes
from nnsight_lab.engine.status import StartProgress
from nnsight_lab.errors import EngineStartFailed

KINDS = ("plain", "ours")
_LIMIT_S = 1800
_MARK = "start: "


def measure(
    model: str = models.DEMO,
    *,
    mode: str = "sync",
    repeat: int = 3,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Start ours and plain vLLM, each in new processes, in turns.

    Args:
        model: As for `nnsight_lab.start`.
        mode: ``sync`` compares with vLLM's LLM, ``async`` with its AsyncLLM.
        repeat: Rounds; the first ones read the model from the disk, so one more runs that does not count.
        say: Told what is going on.
        **options: vLLM engine options, the same for both.

    Returns:
        The ratios and the seconds behind them.
    """
    options.setdefault("max_model_len", 512)
    path = models.resolve(model, dummy=options.get("load_format") == "dummy")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(-1, repeat):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            seen = _child(kind, mode, path, options)
            if number >= 0:
                found[kind].append(seen)
            say(
                f"round {number + 1}/{repeat}: {kind} {seen['first_s']:.1f} s, again {seen['second_s']:.1f} s"
            )
    return {"mode": mode, **summary(found), "package_import_s": _package_import_s()}


def _package_import_s() -> float:
    """What ``import nnsight_lab`` takes, which loads nothing heavy; the least of three."""
    code = "import time; t = time.perf_counter(); import nnsight_lab; print(time.perf_counter() - t)"
    took = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(3)]
    return round(min(float(done.stdout) for done in took), 4)


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Ratios and medians of rounds.

    Args:
        found: What `_start` told, by kind, one of each round.
    """

    def seconds(kind: str, name: str) -> float:
        return round(float(statistics.median(one[name] for one in found[kind])), 2)

    def ratio(name: str) -> float:
        pairs = zip(found["ours"], found["plain"], strict=True)
        return round(float(statistics.median(mine[name] / theirs[name] for mine, theirs in pairs)), 3)

    phases = {name: 0.0 for one in found["ours"] for name in one["phases"]}
    for name in phases:
        phases[name] = round(statistics.median(one["phases"].get(name, 0.0) for one in found["ours"]), 2)
    return {
        "start_vs_plain": ratio("first_s"),
        "second_start_vs_plain": ratio("second_s"),
        "import_s": seconds("ours", "import_s"),
        "phases_s": phases,
        "seconds": {
            kind: {name: seconds(kind, f"{name}_s") for name in ("first", "second", "import")}
            for kind in KINDS
        },
        "rounds": len(found["ours"]),
    }


def report(modes: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The whole benchmark as one JSON-able object; the first mode's ratios are on top."""
    rows = [measure(mode=mode, **settings) for mode in modes]
    top = {key: rows[0][key] for key in ("start_vs_plain", "second_start_vs_plain", "import_s")}
    return {
        **top,
        "rows": rows,
        "versions": {"vllm": pins.vllm_version(), "nnsight": pins.version_of("nnsight")},
        "cpus": os.cpu_count(),
    }


def _child(kind: str, mode: str, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, kind, mode, path, json.dumps(dict(options))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not told:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineStartFailed(f"{kind} did not start: {last}")
    seen: dict[str, Any] = json.loads(told[-1].removeprefix(_MARK))
    return seen


# -- in the process that starts --------------------------------------------------------------------


def _start(kind: str, mode: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start twice.

    Returns:
        ``import_s``, ``first_s`` with that, ``second_s``; and the ``phases`` of the first start.
    """
    start = _ours if kind == "ours" else _plain
    imported = importing.load() if kind == "ours" else _import_plain(mode)
    began = time.perf_counter()
    phases = start(mode, path, options)
    first = imported + time.perf_counter() - began
    _stopped()
    began = time.perf_counter()
    start(mode, path, options)
    second = time.perf_counter() - began
    _stopped()
    return {"import_s": imported, "first_s": first, "second_s": second, "phases": phases}


def _import_plain(mode: str) -> float:
    began = time.perf_counter()
    if mode == "sync":
        from vllm import LLM  # noqa: F401  (what is measured)
    else:
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: F401
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401
    took = time.perf_counter() - began
    import nnsight_lab.bench.stock  # noqa: F401  (ours, and not timed)

    return took


_ended: list[Callable[[], object]] = []


def _stopped() -> None:
    """End what was started, and see it gone."""
    _ended.pop()()
    for engine in {process.engine for process in processes.engine_processes() if _mine(process)}:
        processes.wait_gone(engine, timeout_s=30)


def _mine(process: processes.EngineProcess) -> bool:
    return process.owner == processes.this_owner()


def _ours(mode: str, path: str, options: dict[str, Any]) -> dict[str, float]:
    done: dict[str, float] = {}

    def told(state: StartProgress) -> None:
        done.update(state.done)

    lab.start(path, mode=mode, progress=told, **options)
    _ended.append(lab.stop)
    return done


def _plain(mode: str, path: str, options: dict[str, Any]) -> dict[str, float]:
    from nnsight_lab.bench.stock import plain_vllm  # after vLLM, whose import is timed

    engine = plain_vllm(path, mode, options, {}, as_it_comes="enforce_eager" not in options and _on_gpu())
    engine.__enter__()
    _ended.append(lambda: engine.__exit__(None, None, None))
    return {}


def _on_gpu() -> bool:
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    return not current_platform.is_cpu()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    for name in ("mode", "path", "options"):
        parser.add_argument(name)
    asked = parser.parse_args()
    print(_MARK + json.dumps(_start(asked.kind, asked.mode, asked.path, json.loads(asked.options))))

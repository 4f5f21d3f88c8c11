"""All peers, one after another, and the rows that come of it.

Hugging Face is first, for its values; plain vLLM follows, and is measured again at the very end: how much
slower or faster it then is stands in the report as ``drift``, and ratios are to the mean of both. A row is
never left out: a work that a peer cannot do, a peer that is not installed, an engine that fails and values
that are wrong are rows without seconds whose note says why.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nnsight_lab.bench.peers.child import Ended, lines
from nnsight_lab.bench.peers.environments import SETUP, Environments, Peer
from nnsight_lab.bench.peers.values import TOLERANCES, difference, same_tokens
from nnsight_lab.bench.peers.works import Work
from nnsight_lab.engine.config import OWN_OPTIONS

REFERENCE: Final = "hf"
PLAIN: Final = "plain"
OURS: Final = "nnsight-lab"

#: Below which part of the new tokens it is told that they are not the reference's.
_SAME: Final = 0.9

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        model: A folder with weights, or with a configuration only: then random ones are made.
        peers: Who.
        works: What.
        environments: Where the peers are.
        rounds: That count, of each work.
        dtype: ``"auto"`` is bfloat16 on CUDA and float32 elsewhere.
        options: vLLM engine options, for all peers that stand on it.
        limit_s: Of one peer, its start included.
        work_limit_s: A work that would take longer is told, not run.
        again: Whether plain vLLM is measured again at the end.
        logs: Where what peers print is kept.
        folder: Where made weights, and what each peer told, are kept: who is done there is not run again.
        run: Whether those who are not are run; else what they told before they ended is all there is.
        note: What should be known of the machine, for whoever reads the table.
    """

    model: str
    peers: list[Peer]
    works: list[Work]
    environments: Environments
    rounds: int = 3
    dtype: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 1800.0
    work_limit_s: float = 120.0
    again: bool = True
    logs: Path | None = None
    folder: Path | None = None
    run: bool = True
    note: str = ""


def report(
    plan: Plan,
    say: Callable[[str], None] = lambda text: None,
    tell: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure, as one JSON-able object.

    Args:
        plan: What.
        say: Told of each peer.
        tell: Given each row as it comes, before there are ratios.
    """
    # Before anything of ours runs: what others leave of the machine.
    busy = round(os.getloadavg()[0], 1) if plan.run else None
    with _scratch(plan.folder) as scratch:
        model = _weights(plan, scratch, say)
        seen: dict[str, _Seen] = {}
        for peer in plan.peers:
            seen[peer.name] = _measured(peer, plan, model, scratch, seen, say, tell)
        drift = None
        plain = next((peer for peer in plan.peers if peer.name == PLAIN), None)
        if plan.again and plan.run and plain is not None and seen[PLAIN].seconds and len(plan.peers) > 2:
            drift = _drift(plain, plan, model, scratch, seen[PLAIN], say)
        rows = [row for peer in plan.peers for row in _rows(peer, plan, seen)]
    facts = next((found.facts for found in seen.values() if found.facts), {})
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "model": Path(plan.model).name,
        "machine": {**_machine(facts), "load": busy},
        "note": plan.note,
        "versions": facts.get("versions", {"python": platform.python_version()}),
        "dtype": facts.get("dtype", plan.dtype),
        "ratio_to": plain.title if plain is not None and seen[PLAIN].seconds else "HF transformers + hooks",
        "drift": drift,
        "start_s": {name: found.facts["start_s"] for name, found in seen.items() if found.facts},
        "works": {work.name: dataclasses.asdict(work) for work in plan.works},
        "rows": rows,
    }


@dataclass
class _Seen:
    """What a peer told."""

    facts: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missing: str = ""


def _measured(
    peer: Peer,
    plan: Plan,
    model: str,
    scratch: Path,
    seen: dict[str, _Seen],
    say: Callable[[str], None],
    tell: Callable[[Row], None],
) -> _Seen:
    found = _Seen()
    cuda = any(other.facts.get("device") == "cuda" for other in seen.values())
    if peer.only_cuda and seen and not cuda:
        found.missing = f"cannot: {peer.only_cuda}"
    elif (
        plan.run
        and plan.environments.python(peer) is None
        and not _earlier(scratch / peer.name, [dataclasses.asdict(work) for work in plan.works])
    ):
        found.missing = f"not installed: {SETUP}"
    if found.missing:
        say(f"{peer.name}: {found.missing}")
        return found
    if plan.run:
        say(f"{peer.name}: starting")
    try:
        for line in _told(peer, plan, model, scratch, plan.works):
            if "ready" in line:
                found.facts = line
                say(f"{peer.name}: up after {line['start_s']} s")
            elif "work" in line:
                found.lines[line["work"]] = line
                if line.get("seconds"):
                    found.seconds[line["work"]] = line["seconds"]
                    took = f"{statistics.median(line['seconds']):.3f} s"
                else:
                    took = line["note"]
                say(f"{peer.name}: {line['work']}: {took}")
                tell(
                    {
                        "peer": peer.name,
                        "work": line["work"],
                        "seconds": line.get("seconds"),
                        "note": line["note"],
                    }
                )
    except Ended as error:
        found.missing = f"failed: {error}" if plan.run and not found.facts else f"not run: {error}"
        say(f"{peer.name}: {found.missing}")
    return found


def _told(
    peer: Peer, plan: Plan, model: str, scratch: Path, works: list[Work], turn: str = ""
) -> Iterator[dict[str, Any]]:
    folder = scratch / f"{peer.name}{turn}"
    results = folder / "lines.jsonl"
    asked = [dataclasses.asdict(work) for work in works]
    earlier = _earlier(folder, asked, whole=plan.run)
    if earlier:
        yield from earlier
    if not plan.run and not any("done" in line for line in earlier):
        raise Ended("it had not got so far" if earlier else "it was not asked to")
    if earlier:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    log = (plan.logs or folder) / f"{peer.name}{turn}.log"
    job = {
        "model": model,
        "dtype": plan.dtype,
        "rounds": plan.rounds,
        "works": asked,
        # What is ours alone, such as a budget of saves, means nothing to the others.
        "options": {k: v for k, v in plan.options.items() if peer.name == OURS or k not in OWN_OPTIONS},
        "results": str(results),
        "values": str(folder),
        "limit_s": plan.work_limit_s,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    module = f"nnsight_lab.bench.peers.runners.{peer.runner}"
    command = [str(plan.environments.python(peer)), "-m", module, str(path), *peer.words]
    environment = plan.environments.surroundings(peer, scratch / "anchor")
    yield from lines(command, environment, results, log, plan.limit_s)


def _earlier(folder: Path, asked: list[dict[str, Any]], *, whole: bool = True) -> list[dict[str, Any]]:
    """What a peer told of the same works; empty where it is not done, if the ``whole`` of it is asked for."""
    try:
        text = (folder / "lines.jsonl").read_text(encoding="utf-8")
        told = [json.loads(line) for line in text.splitlines()]
        same = json.loads((folder / "job.json").read_text(encoding="utf-8"))["works"] == asked
    except (OSError, ValueError):
        return []
    return told if same and (not whole or any("done" in line for line in told)) else []


def _rows(peer: Peer, plan: Plan, seen: dict[str, _Seen]) -> Iterator[Row]:
    mine = seen[peer.name]
    to = PLAIN if PLAIN in seen and seen[PLAIN].seconds else REFERENCE
    tolerance = TOLERANCES.get(mine.facts.get("dtype", ""), 0.0)
    for work in plan.works:
        line = mine.lines.get(work.name, {})
        theirs = seen[REFERENCE].lines.get(work.name, {}) if REFERENCE in seen else {}
        notes = [line.get("note") or ("" if line else mine.missing)]
        if peer.asks and line.get("seconds") and mine.facts.get("version") == _pinned(peer):
            notes.append(f"it asks for {peer.asks}")
        seconds = mine.seconds.get(work.name, [])
        far = same = None
        if peer.name != REFERENCE and line.get("tokens") and theirs.get("tokens"):
            same = round(same_tokens(line["tokens"], theirs["tokens"]), 4)
            if line.get("values") and theirs.get("values"):
                far = difference(Path(line["values"]), Path(theirs["values"]))
        if far is not None and far > tolerance:
            notes.insert(0, f"wrong values: rows differ from HF's by {far:.2g} of their norm")
            seconds = []
        elif seconds and line.get("values") and not theirs.get("values") and peer.name != REFERENCE:
            notes.append("values not compared: HF brought none")
        if seconds and same is not None and same < _SAME:
            # Not a verdict: near ties are decided by rounding, and one other token changes all that follow.
            notes.append(f"{same:.0%} of the new tokens are HF's")
        median = statistics.median(seconds) if seconds else None
        beside = seen[to].seconds.get(work.plain) if to in seen else None
        yield {
            "peer": peer.name,
            "version": mine.facts.get("version") or _pinned(peer),
            "work": work.name,
            "seconds": None if median is None else round(median, 5),
            "rounds": len(seconds),
            "ratio": round(median / statistics.median(beside), 3) if median and beside else None,
            "tokens_per_second": None if median is None else round(work.tokens / median, 1),
            "max_difference": None if far is None else float(f"{far:.3g}"),
            "same_tokens": same,
            "note": "; ".join(filter(None, notes)),
        }


def _drift(
    plain: Peer, plan: Plan, model: str, scratch: Path, before: _Seen, say: Callable[[str], None]
) -> float | None:
    """Plain vLLM once more: its ratio of now to then; what it takes now counts as what it took then."""
    say("plain: once more, for drift")
    works = [work for work in plan.works if work.name in before.seconds]
    ratios = []
    try:
        for line in _told(plain, plan, model, scratch, works, "-again"):
            if line.get("seconds"):
                then = before.seconds[line["work"]]
                ratios.append(statistics.median(line["seconds"]) / statistics.median(then))
                before.seconds[line["work"]] = then + line["seconds"]
    except Ended as error:
        say(f"plain: {error}")
    return round(statistics.median(ratios), 3) if ratios else None


def _weights(plan: Plan, scratch: Path, say: Callable[[str], None]) -> str:
    """The model that all load; made at random where its folder has only a configuration."""
    folder = Path(plan.model)
    if (
        not (folder / "config.json").is_file()
        or any(folder.glob("*.safetensors"))
        or any(folder.glob("*.bin"))
    ):
        return plan.model
    made = scratch / f"weights-{folder.resolve().name}"
    if (made / "made").is_file() or not plan.run:
        return str(made)
    say("making random weights, the same for all")
    shutil.rmtree(made, ignore_errors=True)
    module = "nnsight_lab.bench.peers.runners.weights"
    environment = plan.environments.surroundings(Peer("weights", "", ""), scratch / "anchor")
    log = (plan.logs or scratch) / "weights.log"
    command = [sys.executable, "-m", module, str(folder.resolve()), str(made), str(scratch / "weights.jsonl")]
    for _ in lines(command, environment, scratch / "weights.jsonl", log, plan.limit_s):
        pass
    (made / "made").touch()
    return str(made)


@contextmanager
def _scratch(kept: Path | None) -> Iterator[Path]:
    """A folder for jobs, values and made weights; where none is to be kept, in memory if there is room."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        _anchored(kept)
        yield kept.resolve()
        return
    shared = Path("/dev/shm")
    parent = None
    if os.access(shared, os.W_OK):
        room = os.statvfs(shared)
        parent = shared if room.f_bavail * room.f_frsize > 32 * 2**30 else None
    with tempfile.TemporaryDirectory(prefix="nnl-peers-", dir=parent) as name:
        _anchored(Path(name))
        yield Path(name)


def _anchored(folder: Path) -> None:
    """The peers' environments find this package there, and nothing of what is installed beside it."""
    link = folder / "anchor" / "nnsight_lab"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__).resolve().parents[2])


def _pinned(peer: Peer) -> str:
    return peer.requirements[0].partition("==")[2] if peer.requirements else ""


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "gpu": facts.get("gpu")}

"""Two GPUs: an engine of two ranks beside one of one rank, by tensor and by pipeline parallelism.

Every block of `tests.engine.stage_blocks` runs on each of them. In bfloat16 two ways to add up differ in
their last bits, and a pipeline adds up as one rank does; where answers went another way only what precedes
them could be compared, so the sizes of differences are told, and a random tiny model's tokens are far apart.
"""

from __future__ import annotations

import ast
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import nnsight_lab as lab
from nnsight_lab.engine import processes
from nnsight_lab.errors import EngineDied
from nnsight_lab.wire.keys import STEPS
from tests import models
from tests.engine import stage_blocks
from tests.waiting import in_background, until
from tests.worker import mixes

Row = Callable[[str, object, bool], None]
#: Of a value's size, as in `tests.gpu.steps`.
OFF_BY = 0.06
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}
#: What a model of random weights answers alike on every engine: only what is read before its first token.
FIRST_STEP = (
    "every_layer_the_final_norm_and_logits",
    "the_second_stage_is_written_from_what_the_first_gave",
    "both_stages_are_written_in_place_and_by_assignment",
    "a_logit_lens_written_out",
    "edits_of_each_stage_and_of_both",
)
_WAVES, _AT_ONCE = 10, 20


def check(row: Row, *words: str) -> None:
    """Compare the engines.

    Args:
        row: Takes what was seen.
        *words: Names of `KINDS`, for these only; engine options as ``name=value``; and the folder of a model
            of random weights, of which only the first step of a pipeline is looked at (tensor-parallel ranks
            draw other weights). Without one it is a tiny one of our own, with all blocks, requests that come
            and go, and a rank that is killed.
    """
    folder = next((word for word in words if word not in KINDS and "=" not in word), "")
    more = {name: ast.literal_eval(value) for name, _, value in (w.partition("=") for w in words) if value}
    kinds = [kind for kind in KINDS if kind in words or not set(words) & set(KINDS)]
    with tempfile.TemporaryDirectory() as made:
        options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "gpu_memory_utilization": 0.3}
        names = tuple(stage_blocks.BLOCKS)
        if folder:
            options |= {"load_format": "dummy", "seed": 0}
            names = FIRST_STEP
            stage_blocks.EARLY, stage_blocks.MIDDLE, stage_blocks.LATE = 8, 16, 31
            stage_blocks.GOES_ON["max_tokens"] = 1
        else:
            options["max_num_seqs"] = 32
            folder = str(models.tiny_llama(Path(made) / "llama"))
        if folder in words and "tensor" in kinds:
            kinds.remove("tensor")
        wanted: dict[str, Any] = {}
        for kind in kinds:
            began = time.monotonic()
            engine = lab.start(folder, mode="sync", **{**options, **KINDS[kind], **more})
            row(f"{kind}: start, s", round(time.monotonic() - began, 1), True)
            for name in names:
                found = _run(engine, name)
                if kind == "one":
                    wanted[name] = found
                elif name in wanted:
                    said, good = _beside(found, wanted[name])
                    row(f"{kind}: {name}", said, good)
            if len(names) > len(FIRST_STEP):
                _waves(row, kind, engine)
                if kind != "one":
                    _killed(row, kind, engine)
            row(f"{kind}: requests left", _left(engine), not _left(engine))
            if engine.alive:
                lab.stop()


def _run(engine: Any, name: str) -> Any:
    try:
        return stage_blocks.BLOCKS[name](engine)
    except Exception as error:  # a row of its own
        engine.edits.clear()
        return f"{type(error).__name__}: {error}"


def _left(engine: Any) -> int:
    return int(engine.request_count()) if engine.alive else 0


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _beside(found: Any, wanted: Any) -> tuple[str, bool]:
    if isinstance(found, str) or isinstance(wanted, str):
        return f"{str(found)[:160]}; one rank: {str(wanted)[:80]}", False
    mine, theirs = list(_leaves(found)), list(_leaves(wanted))
    if len(mine) != len(theirs):
        return f"{len(mine)} values for {len(theirs)}", False
    worst, other = 0.0, 0
    for one, like in zip(mine, theirs, strict=True):
        if not isinstance(like, torch.Tensor):
            other += one != like
        elif one.shape != like.shape:
            return f"shape {tuple(one.shape)} for {tuple(like.shape)}", False
        elif like.is_floating_point():
            size = float(like.float().abs().max()) or 1.0
            worst = max(worst, float((one.float() - like.float()).abs().max()) / size)
        else:
            other += not torch.equal(one, like)
    return f"off by {worst:.4f} of its size; {other} of {len(mine)} other than numbers differ", (
        worst <= OFF_BY and not other
    )


def _waves(row: Row, kind: str, engine: Any) -> None:
    """Two hundred mixed requests, while an edit comes and goes."""
    before = engine.rpc(STEPS)
    mixes.install(engine)
    asked = [mixes.mix(_AT_ONCE, 100 + wave) for wave in range(_WAVES)]
    running = in_background(lambda: [mixes.run(engine, mix) for mix in asked])
    layers = engine.model.model.layers
    came = 0
    began = time.monotonic()
    while engine.request_count() or time.monotonic() - began < 1:
        with engine.edit("comes") as (tracer, edit):
            seen = [].save()  # type: ignore[attr-defined]
            for _ in tracer.all():
                first = layers[0].output[0][-1]
                seen.append(first + layers[-1].output[0][-1])
        engine.generate([5, 6, 7], edits=["comes"], max_tokens=4, temperature=0, ignore_eos=True)
        edit.clear()
        came += 1
    outputs = running()
    engine.edits.clear()
    count = sum(len(wave) for wave in outputs)
    unsaid = [
        str(one.error)
        for wave, mix in zip(outputs, asked, strict=True)
        for one, request in zip(wave, mix, strict=True)
        if one.error is not None and "fails" not in request.edits
    ]
    row(f"{kind}: mixed requests, edits that came and went", f"{count}, {came}; {unsaid[:2]}", not unsaid)
    ran = [
        {how: count - other["steps"].get(how, 0) for how, count in one["steps"].items()}
        for one, other in zip(engine.rpc(STEPS), before, strict=True)
    ]
    alike = kind != "tensor" or all(one == ran[0] for one in ran)
    row(f"{kind}: steps of each rank", ran, alike)


def _killed(row: Row, kind: str, engine: Any) -> None:
    def run() -> tuple[float, str]:
        try:
            for _ in range(1000):
                engine.generate([[5, 6, 7]] * 8, max_tokens=200, temperature=0, ignore_eos=True)
        except EngineDied as error:
            return time.monotonic(), str(error)
        return time.monotonic(), "no error"

    waiting = in_background(run)
    time.sleep(2)
    left = processes.engine_processes(engine.id)
    victim = next(one for one in left if "Worker" in one.name and one.name.endswith(("1", "TP1", "PP1")))
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    at, said = waiting()
    row(f"{kind}: a rank killed, told after s", round(at - killed, 1), "no error" not in said)
    row(f"{kind}: and what is said", said[:110], len(said.splitlines()) == 1)
    lab.stop()
    until(lambda: not [one for one in left if _lives(one.pid)], 20, "a process outlived its engine")
    row(f"{kind}: processes left", 0, True)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

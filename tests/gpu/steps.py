"""Steps that replay real CUDA graphs, beside an engine that never does: what tests on a CPU only act out.

A random mix of requests (`tests.worker.mixes`) runs together on an engine with graphs, and again on one with
``enforce_eager=True``. In bfloat16 two ways to compute one row differ in their last bits, and where the two
best tokens are as close as that an answer goes another way. So rows are compared as far as the answers are
the same, and most of them must be. A row of another step or request is far off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nnsight_lab as lab
from tests import models
from tests.server.lora import tiny_lora
from tests.worker import mixes

#: Of a value's size: bfloat16 has 8 bits, and four layers round a dozen times each.
OFF_BY = 0.06
_OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 32,
    # So few that long requests are preempted, and go on.
    "num_gpu_blocks_override": 64,
    "gpu_memory_utilization": 0.2,
    "seed": 0,
}
_LONG = {**mixes.GREEDY, "max_tokens": 70}
Row = Callable[[str, object, bool], None]


def check(row: Row, **more: Any) -> None:
    """Compare the two engines.

    Args:
        row: Takes what was seen.
        **more: Options of both, beside those of this file.
    """
    from vllm.lora.request import LoRARequest  # vLLM: seconds to import

    with tempfile.TemporaryDirectory() as folder:
        model = str(models.tiny_llama(Path(folder) / "llama"))
        lora = LoRARequest("tiny", 1, str(tiny_lora(Path(folder) / "lora")))
        options = {**_OPTIONS, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2, **more}
        asked = {
            "any block": mixes.mix(30, 1, mixes.NAMES, lora),
            "blocks that replay": mixes.mix(30, 2, mixes.QUIET, lora),
            "without a LoRA": mixes.mix(30, 3, mixes.QUIET),
            "nothing": [one._replace(edits=()) for one in mixes.mix(30, 4)],
            "long": [one._replace(sampling=_LONG) for one in mixes.mix(24, 5, mixes.QUIET)],
        }
        engine = lab.start(model, mode="sync", **options)
        print(engine.status(), flush=True)
        found, ran = {}, {}
        mixes.install(engine)
        for name, mix in asked.items():
            before = engine.steps(wait_s=10)
            found[name] = mixes.run(engine, mix)
            after = engine.steps(wait_s=10)
            ran[name] = tuple(
                getattr(after, kind) - getattr(before, kind) for kind in ("replayed", "tapped", "eager")
            )
        print(engine.status(), flush=True)
        row("requests left in the worker", engine.request_count(), engine.request_count() == 0)
        lab.stop()
        engine = lab.start(model, mode="sync", enforce_eager=True, **options)
        mixes.install(engine)
        for name, mix in asked.items():
            _compare(row, name, found[name], mixes.run(engine, mix), ran[name])
        lab.stop()
    row("steps with no block: (replayed, tapped, eager)", ran["nothing"], ran["nothing"][1] == 0)
    row("steps that replay stop at taps", ran["blocks that replay"], ran["blocks that replay"][1] > 0)
    row("steps by module are few there", ran["long"], ran["long"][2] < sum(ran["long"]) / 3)


def _compare(row: Row, name: str, found: list[Any], wanted: list[Any], ran: tuple[int, ...]) -> None:
    """What the engine with graphs gave, against the one without."""
    rows = compared = first = answers = 0
    worst, wrong = 0.0, []
    for one, other in zip(found, wanted, strict=True):
        if (one.error is None) != (other.error is None):
            wrong.append(f"{one.error} for {other.error}")
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            answers += 1
            same = mixes.alike(mine, theirs)
            first += same > 0
            for saved, step, value, like in mixes.rows(mine, theirs):
                rows += 1
                # The row of a step was computed from the tokens before it.
                if step > same or (saved == "samples" and step >= same):
                    continue
                compared += 1
                size = 1 + float(like.float().abs().max())
                off = float((value.float() - like.float()).abs().max()) / size
                worst = max(worst, off)
                if off > OFF_BY:
                    wrong.append(f"{saved} at step {step}: off by {off:.2f} of its size")
    row(f"{name}: steps (replayed, tapped, eager)", ran, sum(ran) > 0)
    row(f"{name}: first tokens as without graphs", f"{first} of {answers}", first >= 0.9 * answers)
    if rows:
        row(f"{name}: rows that can be compared", f"{compared} of {rows}", compared >= 0.6 * rows)
    row(f"{name}: rows off, of their size", f"{worst:.4f} {'; '.join(wrong[:3])}", not wrong)

"""Many requests under a saving edit: whether anything grows.

A notebook's engine lives for days, so what a request leaves behind is looked at over thousands of them:
the memory that is each process's alone and that it cannot give back (USS without the pages of slabs, which
are counted apart, and after what is free in the worker's heap was given back), and the shared memory of
saves. The first thousand requests fill caches and arenas, and do not count.

On a CPU oneDNN keeps a primitive of each matrix for each number of tokens and of rows that a step had (the
1,024 latest; 1.3 MB a number on the demo model), and which numbers a batch is split into is chance. So few
requests run at once, and every number of tokens that a step can have is run before anything is counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

import nnsight_lab as lab
from nnsight_lab import pins
from nnsight_lab.engine import models, processes
from nnsight_lab.engine.local import Engine
from nnsight_lab.saves.slab_files import PREFIX
from nnsight_lab.wire.keys import TRIM

_BATCH = 100
_EVERY = 500
_WARM_UP = 1000
#: Of each prompt.
_TOKENS = 5
_AT_ONCE = 10


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        requests: How many were done.
        uss_bytes: Process -> the memory it would give back at its end, slabs aside.
        slab_bytes: What all slabs take.
        used_bytes: What of it saves are in that somebody looks at.
        slabs_made: How many slabs were made so far.
    """

    requests: int
    uss_bytes: dict[str, int]
    slab_bytes: int
    used_bytes: int
    slabs_made: int


def measure(
    model: str = models.DEMO,
    *,
    requests: int = 10_000,
    saving: bool = True,
    mode: str = "sync",
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Run prompts of a few tokens, one new token each, and save every residual stream of each.

    Args:
        model: As for `nnsight_lab.start`.
        requests: How many in all.
        saving: Whether they run the edit; without it, what grows is vLLM's own.
        mode: As for `nnsight_lab.start`.
        say: Told what is going on.
        **options: vLLM engine options.

    Returns:
        ``growth`` after the first thousand requests, and the samples behind it.
    """
    options.setdefault("max_model_len", 256)
    options.setdefault("max_num_seqs", _AT_ONCE)
    say("starting the engine")
    engine = lab.start(model, name="bench-soak", mode=mode, **options)
    try:
        saved_bytes = _install(engine)
        began = time.perf_counter()
        samples = _run(engine, requests, ["all"] if saving else [], say)
        took = time.perf_counter() - began
    finally:
        lab.stop(engine.name)
    return {
        "growth": growth(samples),
        "requests": requests,
        "requests_per_s": round(requests / took, 1),
        "saved_kb_per_request": round(saved_bytes / 1e3, 1) if saving else 0.0,
        "slab_mb": round(samples[-1].slab_bytes / 1e6, 1),
        "used_mb": round(samples[-1].used_bytes / 1e6, 1),
        "samples": [asdict(sample) for sample in samples],
        "versions": {"vllm": pins.vllm_version(), "nnsight": pins.version_of("nnsight")},
    }


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """What grew after the first thousand requests (of a short run: after the first look).

    Returns:
        Each process, and ``slabs``: ``mb`` in all, and ``bytes_per_request``.
    """
    settled = [sample for sample in samples if sample.requests >= _WARM_UP]
    counted = settled if len(settled) > 1 else list(samples)
    first, last = counted[0], counted[-1]
    grown = {name: last.uss_bytes[name] - first.uss_bytes[name] for name in first.uss_bytes}
    grown["slabs"] = last.slab_bytes - first.slab_bytes
    requests = max(1, last.requests - first.requests)
    return {
        name: {"mb": round(nbytes / 1e6, 2), "bytes_per_request": round(nbytes / requests, 1)}
        for name, nbytes in grown.items()
    }


def _install(engine: Engine) -> int:
    """Install the edit; returns the bytes one request saves."""
    layers = engine.model.model.layers
    with engine.edit("all"):
        found: Any = [lab.residual(layer.output) for layer in layers]
        streams = found.save()  # noqa: F841
    (output,) = engine.generate(_prompts(0)[:1], max_tokens=1, temperature=0.0)
    return sum(tensor.numel() * tensor.element_size() for tensor in output.saves["streams"])


def _run(engine: Engine, requests: int, edits: list[str], say: Callable[[str], None]) -> list[Sample]:
    say("running every number of tokens that a step can have")
    most = min(engine._at_once() * _TOKENS, engine._context() - 1)
    for tokens in range(_TOKENS, most + 1, _TOKENS):
        prompt = [(3 * tokens + i) % 200 for i in range(tokens)]
        engine.generate([prompt], edits=edits, max_tokens=1, temperature=0.0)
        engine.saves.clear()  # they are larger than those that are counted, and would stay in their stead
    samples = []
    for done in range(0, requests, _BATCH):
        if done % _EVERY == 0:
            samples.append(_look(engine, done))
            say(_told(samples[-1]))
        prompts = _prompts(done)[: requests - done]
        outputs = engine.generate(prompts, edits=edits, max_tokens=1, temperature=0.0)
        assert not edits or all(output.saves["streams"] for output in outputs)
    del outputs
    samples.append(_look(engine, requests))
    say(_told(samples[-1]))
    return samples


def _prompts(start: int) -> list[list[int]]:
    """Prompts of five tokens, none like another."""
    return [[(7 * i + 13 * j + i // 97) % 200 for j in range(_TOKENS)] for i in range(start, start + _BATCH)]


def _look(engine: Engine, requests: int) -> Sample:
    gc.collect()
    engine._driver.home.flush()
    engine.rpc(TRIM)
    figures = engine.rpc("lab_slabs")
    uss = {"kernel": _uss(None)}
    for process in sorted(processes.engine_processes(engine.id), key=lambda process: process.pid):
        name = process.name.removeprefix("VLLM::")
        uss[name if name not in uss else f"{name} {process.pid}"] = _uss(process.pid)
    return Sample(
        requests,
        uss,
        sum(rank["total_bytes"] for rank in figures),
        sum(rank["used_bytes"] for rank in figures),
        sum(rank["made"] for rank in figures),
    )


def _uss(pid: int | None) -> int:
    """What is a process's alone, slabs aside, of which the worker has every page that nobody else read."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return sum(one.private_clean + one.private_dirty for one in maps if PREFIX not in one.path)


def _told(sample: Sample) -> str:
    each = ", ".join(f"{name} {uss / 1e6:.1f} MB" for name, uss in sample.uss_bytes.items())
    return f"{sample.requests} requests: {each}, slabs {sample.slab_bytes / 1e6:.1f} MB"

"""What bringing saves home costs, beside nnsight's own road.

The *road home* is timed directly in both engines: from asking the workers for what finished requests
saved until it is in the caller's hands, over a few prompts one by one (else the asking waits for a step
under way). What saving costs a whole call is a difference of calls; ``gb_per_s`` is the
bytes over it. The floors: bytes over memory bandwidth, one copy in the worker, none in the kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import nnsight_lab as lab
from nnsight_lab import pins
from nnsight_lab.bench import rounds
from nnsight_lab.bench.stock import nnsight_alone
from nnsight_lab.engine import models
from nnsight_lab.engine.local import Engine


def measure(
    model: str = models.DEMO,
    *,
    count: int = 64,
    tokens: int = 256,
    repeat: int = 5,
    few_count: int = 8,
    nnsight: bool = True,
    mode: str = "sync",
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Save every residual stream of ``count`` prompts of ``tokens`` tokens, one new token each.

    Args:
        model: As for `nnsight_lab.start`.
        count: How many prompts.
        tokens: How long each is.
        repeat: Rounds that count.
        few_count: Over how many of the prompts the road home is timed, in both.
        nnsight: Whether stock nnsight runs beside it.
        mode: As for `nnsight_lab.start`.
        say: Told what is going on.
        **options: vLLM engine options, the same for both.

    Returns:
        The ratios, and the seconds behind them.
    """
    options.setdefault("max_model_len", 2 * tokens)
    # What is measured would be answered from the round before, here and there.
    options.setdefault("enable_prefix_caching", False)
    path = models.resolve(model, dummy=options.get("load_format") == "dummy")
    texts = [[(17 * i + 5 * j) % 20000 + 100 for j in range(tokens)] for i in range(count)]
    few = texts[:few_count]
    with ExitStack() as stack:
        say("starting our engine")
        engine = lab.start(path, name="bench-saves", mode=mode, **options)
        stack.callback(lab.stop, engine.name)
        saved_bytes = _install(engine, texts[:1]) * count
        # Shared memory is made when it is first needed, and reused: the first call pays for it.
        _run(engine, texts, [])
        first = _seconds(lambda: _run(engine, texts, ["all"]))
        timers = {"ours": _Timer(), "nnsight": _Timer()}
        works: dict[str, Callable[[], object]] = {
            "none": lambda: _run(engine, texts, []),
            "compute": lambda: _run(engine, texts, ["compute"]),
            "all": lambda: _run(engine, texts, ["all"]),
            "last": lambda: _run(engine, texts, ["last"]),
            "few": lambda: timers["ours"].of(engine, lambda: _one_by_one(engine, few)),
        }
        if nnsight:
            say("starting stock nnsight")
            peer = stack.enter_context(nnsight_alone(path, options))
            works["nnsight"] = _nnsight(peer, few, timers["nnsight"])
        seen = rounds.run(works, repeat, warm_up=2, say=say)
    home, costs = timers["ours"].median(repeat), _difference(seen, "all", "none")
    few_bytes = saved_bytes / count * len(few)
    row: dict[str, Any] = {
        "call_vs_no_save": round(seen.ratio("all", "none"), 3),
        "block_vs_no_block": round(seen.ratio("compute", "none"), 3),
        "last_token_vs_no_save": round(seen.ratio("last", "none"), 3),
        "gb_per_s": round(saved_bytes / 1e9 / costs, 2) if costs > 0 else None,
        "saving_costs_s": round(costs, 4),
        "road_home_s": round(home, 4),
        "road_home_gb_per_s": round(few_bytes / 1e9 / home, 2),
        "slabs_start_s": round(first - seen.median("all"), 3),
        "saved_gb": round(saved_bytes / 1e9, 3),
        "seconds": {name: round(seen.median(name), 4) for name in works},
        "rounds": repeat,
        "prompts": count,
        "few_prompts": len(few),
        "tokens": tokens,
        "versions": {"vllm": pins.vllm_version(), "nnsight": pins.version_of("nnsight")},
    }
    if nnsight:
        theirs = timers["nnsight"].median(repeat)
        row["nnsight_road_home_s"] = round(theirs, 4)
        row["road_home_vs_nnsight"] = round(home / theirs, 4)
    return row


class _Timer:
    """Seconds of the road home in each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.running = 0.0

    def of(self, engine: Engine, work: Callable[[], object]) -> None:
        """Run ``work`` and note how long our driver spent collecting."""
        before = engine._driver.home_s
        work()
        self.seconds.append(engine._driver.home_s - before)

    def median(self, repeat: int) -> float:
        """Over the rounds that count."""
        return statistics.median(self.seconds[-repeat:])


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _difference(seen: rounds.Rounds, work: str, to: str) -> float:
    pairs = zip(seen.seconds[work], seen.seconds[to], strict=True)
    return statistics.median(mine - theirs for mine, theirs in pairs)


def _run(engine: Engine, texts: list[Any], edits: list[str]) -> None:
    # The outputs, and their memory, go with the last reference; a collection of the whole heap here
    # takes longer than the call and would flatter every ratio.
    engine.generate(texts, edits=edits, max_tokens=1, temperature=0.0)
    engine.saves.clear()  # else they go to files, by another thread, while the next call is measured


def _one_by_one(engine: Engine, texts: list[Any]) -> None:
    for text in texts:
        _run(engine, [text], ["all"])


def _install(engine: Engine, sample: list[Any]) -> int:
    """Install the three edits; returns the bytes one prompt saves."""
    layers = engine.model.model.layers
    with engine.edit("all") as (_, all_streams):
        found: Any = [lab.residual(layer.output) for layer in layers]
        streams = found.save()  # noqa: F841
    with engine.edit("compute") as (_, compute):
        unsaved = [lab.residual(layer.output) for layer in layers]  # noqa: F841
    with engine.edit("last") as (_, last):
        row = layers[len(layers) // 2].output[0][-1].save()  # noqa: F841
    for edit in (all_streams, compute, last):
        edit.switch_off()
    (output,) = engine.generate(sample, edits=["all"], max_tokens=1, temperature=0.0)
    return sum(t.numel() * t.element_size() for t in output.saves["streams"])


def _nnsight(model: Any, texts: list[Any], timer: _Timer) -> Callable[[], object]:
    """Nnsight's registered edit with the same block; the sum is a new tensor, so no clone is needed.

    Its collect is an RPC and the unpickling of what came back, both timed.
    """
    from nnsight.modeling.vllm.engines import engine as theirs

    layers = model.model.layers
    with model.edit(name="all"):
        found: Any = [layer.output[0] + layer.output[1] for layer in layers]
        streams = found.save()  # noqa: F841
    core = model.vllm_entrypoint.llm_engine.engine_core
    rpc, merge = core.collective_rpc, theirs.merge_collected

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                timer.running += time.perf_counter() - began

        return run

    core.collective_rpc, theirs.merge_collected = timed(rpc), timed(merge)
    prompts = [[{"prompt_token_ids": text}] for text in texts]

    def generate() -> None:
        timer.running = 0.0
        for prompt in prompts:
            model.generate(prompt, edits=["all"], max_tokens=1, temperature=0.0)
        timer.seconds.append(timer.running)

    return generate

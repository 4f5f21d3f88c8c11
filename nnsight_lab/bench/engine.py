"""What the engine costs over plain vLLM, and what nnsight alone costs beside it.

Three engines of one model stand side by side in one process tree: plain vLLM, stock nnsight, ours.
The floors: a request without a block should cost nothing (it is not tracked at all), a trace over
many prompts one installation of its block and one collect a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import nnsight_lab as lab
from nnsight_lab import pins
from nnsight_lab.bench import rounds
from nnsight_lab.bench.stock import nnsight_alone, plain_vllm
from nnsight_lab.engine import models
from nnsight_lab.engine.local import Engine

_TOKENS = 16
_WORDS = ("river", "stone", "market", "window", "letter", "garden", "engine", "silver", "bridge", "winter")


def prompts(count: int) -> list[str]:
    """``count`` different prompts of ten to thirty words."""
    return [
        " ".join(_WORDS[(i * 7 + j * 3) % len(_WORDS)] for j in range(10 + i % 21)) + f" number {i} is"
        for i in range(count)
    ]


def measure(
    model: str = models.DEMO,
    *,
    mode: str = "sync",
    count: int = 64,
    repeat: int = 7,
    nnsight: bool = True,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure one mode.

    Args:
        model: As for `nnsight_lab.start`.
        mode: ``sync`` compares with vLLM's LLM, ``async`` with its AsyncLLM.
        count: How many prompts a work runs, 16 new tokens each.
        repeat: Rounds that count.
        nnsight: Whether stock nnsight runs beside.
        say: Told what is going on.
        **options: vLLM engine options, the same for all three.

    Returns:
        The ratios and the seconds behind them.
    """
    options.setdefault("max_model_len", 512)
    # What is measured would be answered from the round before, here and there.
    options.setdefault("enable_prefix_caching", False)
    path = models.resolve(model, dummy=options.get("load_format") == "dummy")
    texts = prompts(count)
    with ExitStack() as stack:
        say("starting our engine")
        engine = lab.start(path, name=f"bench-{mode}", mode=mode, **options)
        stack.callback(lab.stop, engine.name)
        say("starting plain vLLM")
        plain = stack.enter_context(plain_vllm(path, mode, options, _sampling()))
        works: dict[str, Callable[[], object]] = {
            "plain": lambda: plain(texts),
            "nothing": lambda: engine.generate(texts, **_sampling()),
            "trace": lambda: _trace_all(engine, texts),
            "edit": lambda: engine.generate(texts, edits=["bench"], **_sampling()),
        }
        if nnsight and mode == "sync":
            say("starting stock nnsight")
            peer = stack.enter_context(nnsight_alone(path, options))
            works["nnsight"] = lambda: _nnsight_traces(peer, texts)
        with engine.edit("bench") as (_, edit):
            last = engine.model.model.layers[8].output[0][-1].save()  # noqa: F841
        edit.switch_off()
        seen = rounds.run(works, repeat, say=say)
        first = rounds.run(_first_token(engine, texts[0]), 5 * repeat, warm_up=3)
    row: dict[str, Any] = {
        "mode": mode,
        "nothing_registered_vs_plain": round(seen.ratio("nothing", "plain"), 3),
        "trace64_vs_plain": round(seen.ratio("trace", "plain"), 3),
        "edit64_vs_plain": round(seen.ratio("edit", "plain"), 3),
        "first_token_overhead_ms": round(first.difference_ms("cell", "generate"), 2),
        "seconds": {name: round(seen.median(name), 4) for name in works},
        "rounds": repeat,
        "prompts": count,
        "new_tokens": _TOKENS,
    }
    if "nnsight" in works:
        row["nnsight_trace64_vs_plain"] = round(seen.ratio("nnsight", "plain"), 3)
    return row


def report(modes: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    """The whole benchmark as one JSON-able object; the first mode's ratios are on top."""
    rows = [measure(mode=mode, **settings) for mode in modes]
    keys = (
        "nothing_registered_vs_plain",
        "trace64_vs_plain",
        "nnsight_trace64_vs_plain",
        "first_token_overhead_ms",
    )
    top = {key: next((row[key] for row in rows if key in row), None) for key in keys}
    return {
        **top,
        "rows": rows,
        "versions": {"vllm": pins.vllm_version(), "nnsight": pins.version_of("nnsight")},
        "cpus": os.cpu_count(),
    }


def _sampling() -> dict[str, Any]:
    return {"max_tokens": _TOKENS, "temperature": 0.0, "ignore_eos": True}


def _trace_all(engine: Engine, texts: list[str]) -> None:
    model = engine.model
    with engine.trace(texts, edits=[], **_sampling()):
        last = model.model.layers[8].output[0][-1].save()
    assert len(last) == len(texts)


def _nnsight_traces(model: Any, texts: list[str]) -> None:
    """Nnsight's way to run a block over many prompts: one invoke, and one copy of the block, each."""
    with model.trace(**_sampling()) as tracer:
        for text in texts:
            with tracer.invoke(text):
                last = model.model.layers[8].output[0][-1].clone().save()  # noqa: F841


def _first_token(engine: Engine, text: str) -> dict[str, Callable[[], object]]:
    """A cell with a trace, and a cell with a plain generate, of one token, in a real IPython shell."""
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell.instance()
    shell.extension_manager.load_extension("nnsight_lab")
    shell.user_ns.update(engine=engine, model=engine.model, text=text)

    def cell(source: str) -> Callable[[], object]:
        def run() -> None:
            shell.run_cell(source, store_history=False).raise_error()

        return run

    head = "%%trace text, max_tokens=1, temperature=0, show=False, edits=[]\n"
    return {
        "cell": cell(head + "last = model.model.layers[8].output[0][-1].save()"),
        "generate": cell("_ = engine.generate(text, max_tokens=1, temperature=0, edits=[])"),
    }

"""What blocks cost where plain vLLM is at its fastest: with its defaults, CUDA graphs and compiled code.

Two engines of one model share the device. The floors: a step in which no block waits replays the graph plain
vLLM would, so nothing is added but a look at who waits; what a block reads costs its bytes over the memory's
bandwidth; what it says at each token costs Python, request by request, while the device waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import nnsight_lab as lab
from nnsight_lab.bench import rounds
from nnsight_lab.bench.stock import plain_vllm
from nnsight_lab.engine import models
from nnsight_lab.engine.local import Engine
from nnsight_lab.wire.keys import STEPS

#: Many short prompts that go on, and fewer long ones that do not.
_MANY, _MANY_TOKENS, _NEW = 128, 128, 64
_LONG, _LONG_TOKENS = 64, 512

_GOES_ON: Final[dict[str, Any]] = {"max_tokens": _NEW, "temperature": 0.0, "ignore_eos": True}
_ONE: Final[dict[str, Any]] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}

#: Field -> the work, and plain vLLM's beside it.
_RATIOS: Final = {
    "nothing_registered_vs_plain": ("nothing", "plain"),
    "one_layer_vs_plain": ("one_layer", "plain"),
    "logits_every_token_vs_plain": ("logits", "plain"),
    "probe_every_token_vs_plain": ("probe", "plain"),
    "steer_every_token_vs_plain": ("steer", "plain"),
    "trace128_vs_plain": ("trace", "plain"),
    "all_layers_vs_plain": ("all_layers", "plain_long"),
    "single_stream_vs_plain": ("single", "plain_single"),
}


def measure(
    model: str = models.DEMO,
    *,
    repeat: int = 5,
    scale: int = 1,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure our engine beside plain vLLM with its defaults.

    Args:
        model: As for `nnsight_lab.start`.
        repeat: Rounds that count.
        scale: Divides the numbers of prompts, for a slow machine.
        say: Told what is going on.
        **options: vLLM engine options, the same for both.

    Returns:
        The ratios, the seconds behind them, and how our steps ran.
    """
    options.setdefault("max_model_len", 1024)
    # What is measured would be answered from the round before, here and there.
    options.setdefault("enable_prefix_caching", False)
    path = models.resolve(model, dummy=options.get("load_format") == "dummy")
    with ExitStack() as stack:
        say("starting our engine")
        engine = lab.start(path, name="bench-speed", mode="sync", **options)
        stack.callback(lab.stop, engine.name)
        # Rounds are compared with rounds: the store would keep the first ones' saves at the last ones' cost.
        engine.saves.max_requests = 0
        many = _prompts(max(1, _MANY // scale), _MANY_TOKENS, 7, engine.facts().vocabulary)
        long = _prompts(max(1, _LONG // scale), _LONG_TOKENS, 11, engine.facts().vocabulary)
        say("starting plain vLLM")
        plain = stack.enter_context(plain_vllm(path, "sync", options, _GOES_ON, as_it_comes=True))
        _install(engine)
        works: dict[str, Callable[[], object]] = {
            "plain": lambda: plain(many),
            "plain_long": lambda: plain(long, _ONE),
            "plain_single": lambda: plain(many[:1]),
            "nothing": lambda: engine.generate(many, edits=[], **_GOES_ON),
            "nothing_long": lambda: engine.generate(long, edits=[], **_ONE),
            "nothing_single": lambda: engine.generate(many[:1], edits=[], **_GOES_ON),
            "one_layer": lambda: engine.generate(many, edits=["one_layer"], **_GOES_ON),
            "logits": lambda: engine.generate(many, edits=["logits"], **_GOES_ON),
            "probe": lambda: engine.generate(many, edits=["probe"], **_GOES_ON),
            "steer": lambda: engine.generate(many, edits=["steer"], **_GOES_ON),
            "trace": lambda: _trace(engine, many),
            "all_layers": lambda: engine.generate(long, edits=["all_layers"], **_ONE),
            "single": lambda: engine.generate(many[:1], edits=["steer"], **_GOES_ON),
        }
        steps: dict[str, Any] = {}
        for name in works:
            before = _steps(engine)
            works[name]()
            after = _steps(engine)
            steps[name] = {kind: count - before.get(kind, 0) for kind, count in after.items()}
        seen = rounds.run(works, repeat, say=say)
        figures = engine.rpc(STEPS)[0]
    found: dict[str, Any] = {
        field: round(seen.ratio(work, beside), 3) for field, (work, beside) in _RATIOS.items()
    }
    return found | {
        "seconds": {name: round(seen.median(name), 4) for name in works},
        "steps": steps,
        "reasons": figures["reasons"],
        "rounds": repeat,
        "prompts": len(many),
        "long_prompts": len(long),
    }


def _prompts(count: int, tokens: int, stride: int, vocabulary: int) -> list[list[int]]:
    span = min(20_000, vocabulary - 100)
    return [[(stride * i + 3 * j) % span + 100 for j in range(tokens)] for i in range(count)]


def _steps(engine: Engine) -> dict[str, int]:
    return dict(engine.rpc(STEPS)[0]["steps"])


def _install(engine: Engine) -> None:
    import torch  # for a block

    layers = engine.model.model.layers
    middle = layers[len(layers) // 2]
    with engine.trace([5, 6, 7, 8], edits=[], **_ONE):
        row = middle.output[0][-1].save()
    device = "cuda" if engine.status().device == "cuda" else "cpu"
    edits = []
    with engine.edit("one_layer") as (_, edit):
        hidden = middle.output[0].save()  # noqa: F841
    edits.append(edit)
    with engine.edit("logits") as (tracer, edit):
        best = list().save()  # type: ignore[attr-defined]  # noqa: C408
        for _ in tracer.all():
            best.append(engine.model.logits[0].max())
    edits.append(edit)
    with engine.edit("probe") as (tracer, edit):
        direction = torch.ones(row.shape, device=device, dtype=row.dtype)
        scores = list().save()  # type: ignore[attr-defined]  # noqa: C408
        for _ in tracer.all():
            scores.append(middle.output[0][-1] @ direction)
    edits.append(edit)
    with engine.edit("steer") as (tracer, edit):
        for _ in tracer.all():
            middle.output[0][:] += 0.01
    edits.append(edit)
    with engine.edit("all_layers") as (_, edit):
        streams = list().save()  # type: ignore[attr-defined]  # noqa: C408
        for layer in layers:
            streams.append(layer.output[0])
    edits.append(edit)
    for edit in edits:
        edit.switch_off()


def _trace(engine: Engine, prompts: list[list[int]]) -> None:
    layers = engine.model.model.layers
    middle = layers[len(layers) // 2]
    with engine.trace(prompts, edits=[], **_GOES_ON):
        last = middle.output[0][-1].save()
    assert len(last) == len(prompts)

"""What only a CUDA machine can show; run by hand, never by CI.

    python tests/gpu/check.py MODEL_DIR [sync|async|graphs]
    python tests/gpu/check.py steps [tensor_parallel_size=2]
    python tests/gpu/check.py ranks [MODEL_DIR]

``MODEL_DIR`` holds a configuration and a tokenizer; weights are random (``load_format="dummy"``). On
CUDA vLLM's fused kernels overwrite activation buffers in place, so this is where unclone'd saves are
compared with clones, in-place edits with assignment, and our overheads with plain vLLM's. ``graphs``
runs the same saves and edits on an engine that replays CUDA graphs, tapped at those locations; ``steps``
a mix of many requests on an engine with graphs and on one without, of a tiny model of its own (see
`tests.gpu.steps`); ``ranks``, on two GPUs, engines of two ranks beside one of one (see `tests.gpu.ranks`).
Prints a short table last; exits 1 when a check failed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nnsight_lab as lab

ROWS: list[tuple[str, str, bool]] = []
PROMPT = list(range(100, 164))
_SITES = ("self_attn.qkv_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_up_proj")
#: Every location that is read below.
TAPS = [f"model.layers.*.{site}.output" for site in (*_SITES, "mlp.down_proj", "mlp")] + [
    "model.layers.*.output"
]


def row(name: str, seen: object, good: bool = True) -> None:
    ROWS.append((name, str(seen), good))
    print(f"@@ {'ok  ' if good else 'FAIL'} {name}: {seen}", flush=True)


def difference(a: Any, b: Any) -> float:
    return float((a.float() - b.float()).abs().max())


def safe_saves(engine: Any) -> None:
    """Unclone'd saves against clones, at every kind of location."""
    model = engine.model
    layer = model.model.layers[1]
    sites: dict[str, Callable[[], Any]] = {
        "qkv_proj": lambda: layer.self_attn.qkv_proj.output[0],
        "o_proj": lambda: layer.self_attn.o_proj.output[0],
        "post_attention_layernorm[0]": lambda: layer.post_attention_layernorm.output[0],
        "post_attention_layernorm[1]": lambda: layer.post_attention_layernorm.output[1],
        "gate_up_proj": lambda: layer.mlp.gate_up_proj.output[0],
        "down_proj": lambda: layer.mlp.down_proj.output[0],
        "mlp": lambda: layer.mlp.output,
        "layer output[0]": lambda: layer.output[0],
        "layer output[1]": lambda: layer.output[1],
        "layer output[0][-1]": lambda: layer.output[0][-1],
    }
    for name in sites:
        site = sites[name]
        with engine.trace(PROMPT, max_tokens=2, temperature=0):
            kept = site().save()
            copy = site().clone().save()
        off = difference(kept, copy)
        row(f"save against clone: {name}", off, off == 0.0)
    with engine.trace(PROMPT, max_tokens=2, temperature=0):
        kept = lab_list().save()
        copies = lab_list().save()
        for each in model.model.layers:
            value = each.output[0]
            kept.append(value)
            copies.append(value.clone())
    off = max(difference(a, b) for a, b in zip(kept, copies, strict=True))
    row("save against clone: a list over all layers", off, off == 0.0)
    with engine.trace(PROMPT, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
        kept = lab_list().save()
        copies = lab_list().save()
        for _ in tracer.iter[:4]:
            value = layer.output[0]
            kept.append(value)
            copies.append(value.clone())
    off = max(difference(a, b) for a, b in zip(kept, copies, strict=True))
    row("save against clone: every step of generation", off, off == 0.0)


def lab_list() -> list[Any]:
    return []


def edits_reach_the_model(engine: Any) -> None:
    model = engine.model
    layer = model.model.layers[1]

    def logits(how: str) -> Any:
        if how == "none":
            with engine.trace(PROMPT, max_tokens=1, temperature=0):
                out = model.logits.save()
        elif how == "in place":
            with engine.trace(PROMPT, max_tokens=1, temperature=0):
                layer.output[0][:] += 0.5
                out = model.logits.save()
        else:
            with engine.trace(PROMPT, max_tokens=1, temperature=0):
                value = layer.output
                layer.output = (value[0] + 0.5, value[1])
                out = model.logits.save()
        return out

    base, inplace, assigned = logits("none"), logits("in place"), logits("assigned")
    row("in-place edit moves the logits by", difference(inplace, base), difference(inplace, base) > 0)
    row("assignment against in place", difference(assigned, inplace), difference(assigned, inplace) == 0.0)
    row("saved tensors are on", str(base.device), str(base.device) == "cpu")
    import torch

    row("this process has a CUDA context", torch.cuda.is_initialized(), not torch.cuda.is_initialized())


def features(engine: Any) -> None:
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        seen = model.model.layers[2].output[0][-1].save()  # noqa: F841
    outputs = engine.generate([PROMPT, PROMPT[:20]], max_tokens=3, temperature=0, ignore_eos=True)
    row("an edit saves on each output", [tuple(o.saves["seen"].shape) for o in outputs])
    outputs = engine.generate(PROMPT, n=3, max_tokens=3, temperature=1.0, ignore_eos=True)
    row("n=3 brings three sequences", len([c.saves["seen"] for c in outputs[0].outputs]) == 3)
    edit.clear()
    row("requests left in the worker", engine.request_count(), engine.request_count() == 0)
    try:
        with engine.trace(PROMPT, max_tokens=1):
            value = model.logits.save()
            late = model.model.layers[0].output[0].save()  # noqa: F841
        row("a read out of order is an error", "no error", False)
    except lab.errors.TraceError as error:
        row("a read out of order is an error", str(error)[:60])
    with engine.trace([PROMPT, PROMPT[:8]], max_tokens=2, temperature=0, ignore_eos=True):
        value = model.model.layers[3].output[0].save()
    row("a list of prompts", [tuple(v.shape) for v in value])
    with engine.trace(max_tokens=2, temperature=0) as tracer:
        with tracer.invoke(PROMPT[:10]):
            first = model.model.layers[3].output[0].save()
        with tracer.invoke(PROMPT[:5]):
            second = model.model.layers[3].output[0].save()
    row("two invokes", [tuple(first.shape), tuple(second.shape)])


def run_together(engine: Any) -> None:
    """Readings that run once for many requests against the same that run for each, on their own tokens."""
    import torch

    model = engine.model
    with engine.edit("many") as (tracer, many):
        ids, best, top, spread = [].save(), [].save(), [].save(), [].save()
        for _ in tracer.all():
            logits = model.logits[0]
            best.append(logits.max())
            top.append(logits.topk(5).values)
            spread.append(logits.float().logsumexp(-1))
            ids.append(model.samples[0])
    with engine.edit("each") as (tracer, each):
        ids, best, top, spread = [].save(), [].save(), [].save(), [].save()
        for _ in tracer.all():
            if True:  # of a block with a condition nobody knows that it is the same for all
                logits = model.logits[0]
                best.append(logits.max())
                top.append(logits.topk(5).values)
                spread.append(logits.float().logsumexp(-1))
                ids.append(model.samples[0])
    prompts = [[100 + 7 * i + j for j in range(8 + i)] for i in range(24)]
    settings = [
        {"max_tokens": 24, "ignore_eos": True},
        {"max_tokens": 24, "stop_token_ids": list(range(9999))},
    ]
    for how, more in zip(("of one length", "of many lengths"), settings, strict=True):
        took, found = [], []
        for name in ("many", "each", "many", "each"):
            began = time.perf_counter()
            found.append(engine.generate(prompts, edits=[name], temperature=0, **more))
            took.append(time.perf_counter() - began)
        own = all(
            [int(one) for one in output.saves["ids"]] == list(output.outputs[0].token_ids)
            for outputs in found
            for output in outputs
        )
        row(f"requests {how} have the samples of their own tokens", own, own)
        exact, close, pairs = True, 0.0, 0
        for one, other in zip(found[2], found[3], strict=True):
            for at, (a, b) in enumerate(zip(one.saves["ids"], other.saves["ids"], strict=False)):
                exact &= torch.equal(one.saves["best"][at], other.saves["best"][at])
                exact &= torch.equal(one.saves["top"][at], other.saves["top"][at])
                close = max(close, difference(one.saves["spread"][at], other.saves["spread"][at]))
                pairs += 1
                if int(a) != int(b):
                    break  # what follows another token is another text
        row(f"their largest logits are the same, {pairs} steps", exact, exact)
        row("their logsumexp differ by", close, close < 1e-3)
        row("seconds together and by themselves", f"{took[2]:.3f} {took[3]:.3f}")
    many.clear()
    each.clear()


def seconds(work: Callable[[], object], repeat: int = 3) -> float:
    work()
    took = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def overheads(engine: Any) -> None:
    """W1 and W2 of the shared measurements, on the engine as it is today (eager)."""
    model = engine.model
    short = [[(7 * i + j) % 30000 + 10 for j in range(128)] for i in range(128)]
    long = [[(11 * i + j) % 30000 + 10 for j in range(512)] for i in range(64)]
    w1 = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    w2 = {"max_tokens": 1, "temperature": 0.0}
    nothing1 = seconds(lambda: engine.generate(short, **w1))
    nothing2 = seconds(lambda: engine.generate(long, **w2))
    row("W1 nothing registered, s", round(nothing1, 3))
    row("W2 nothing registered, s", round(nothing2, 3))
    with engine.edit("one") as (tracer, one):
        hidden = model.model.layers[16].output[0].save()
    one.switch_off()
    row(
        "W1 save one layer (prefill), s",
        round(seconds(lambda: engine.generate(short, edits=["one"], **w1)), 3),
    )
    row(
        "W2 save one layer (268 MB), s", round(seconds(lambda: engine.generate(long, edits=["one"], **w2)), 3)
    )
    with engine.edit("last") as (tracer, last):
        hidden = model.model.layers[16].output[0][-1].save()  # noqa: F841
    last.switch_off()
    row(
        "W2 save last row of one layer, s",
        round(seconds(lambda: engine.generate(long, edits=["last"], **w2)), 3),
    )
    with engine.edit("steer") as (tracer, steer):
        for _ in tracer.all():
            model.model.layers[16].output[0][:] += 0.01
    steer.switch_off()
    row("W1 steer every token, s", round(seconds(lambda: engine.generate(short, edits=["steer"], **w1)), 3))


def main() -> int:
    if sys.argv[1] == "steps":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.gpu.steps import check

        more = dict(word.split("=", 1) for word in sys.argv[2:])
        check(row, **{name: int(value) for name, value in more.items()})
        return _told(" ".join(sys.argv[1:]))
    if sys.argv[1] == "ranks":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.gpu import ranks

        ranks.check(row, *sys.argv[2:])
        return _told(" ".join(sys.argv[1:]))
    folder = sys.argv[1]
    assert Path(folder, "config.json").is_file(), folder
    mode = sys.argv[2] if len(sys.argv) > 2 else "sync"
    began = time.monotonic()
    options = {"load_format": "dummy", "max_model_len": 1024, "gpu_memory_utilization": 0.6, "seed": 0}
    graphs = mode == "graphs"
    if graphs:
        options |= {"taps": TAPS, "max_num_seqs": 32}
    engine = lab.start(folder, mode="sync" if graphs else mode, **options)
    row("start, s", round(time.monotonic() - began, 1))
    print(engine.status(), flush=True)
    try:
        safe_saves(engine)
        edits_reach_the_model(engine)
        run_together(engine)
        if not graphs:
            features(engine)
        if mode == "sync":
            overheads(engine)
    finally:
        report = lab.stop()
        row("stop", report, not report.left)
    return _told(mode)


def _told(what: str) -> int:
    """The table."""
    print(f"\n{what}")
    for name, seen, good in ROWS:
        print(f"{'ok  ' if good else 'FAIL'} {name:<48} {seen}")
    return 0 if all(good for _, _, good in ROWS) else 1


if __name__ == "__main__":
    raise SystemExit(main())

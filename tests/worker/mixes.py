"""Requests of every kind, mixed at random: edits that wait for taps, for any module, for logits, for nothing.

Of each it is known at which step each saved row was read, so that two engines can be compared as far as they
generated the same tokens. No engine and no worker is named here: a CPU acts replays out, a GPU has them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nnsight_lab.engine.call import Call

GREEDY = {"temperature": 0.0, "ignore_eos": True}
NAMES = (
    "tap", "tap_window", "module", "module_once", "logits", "samples", "prompt_only", "steer", "changes",
    "stops", "fails",
)  # fmt: skip
#: Those that no step of generation need run module by module for.
QUIET = ("tap", "tap_window", "logits", "samples", "prompt_only", "steer", "stops", "fails")
#: The step that a saved list's first row is of, where it is not the prompt's.
_FIRST = {"tap_window": 2, "module_once": 3}


class Wanted(NamedTuple):
    """One request of a mix."""

    prompt: list[int]
    edits: tuple[str, ...]
    sampling: dict[str, Any]


def install(engine: Any) -> None:
    """An edit of each kind; none runs on requests that name none."""
    model = engine.model
    with engine.edit("tap") as (tracer, _):
        tap = [].save()
        for _ in tracer.all():
            tap.append(model.model.layers[2].output[0][-1])
    with engine.edit("tap_window") as (tracer, _):
        tap_window = [].save()
        for _ in tracer.iter[2:5]:
            tap_window.append(model.model.layers[3].input[-1])
    with engine.edit("module") as (tracer, _):
        module = [].save()
        for _ in tracer.all():
            module.append(model.model.layers[1].mlp.output[-1])
    with engine.edit("module_once") as (tracer, _):
        module_once = [].save()
        for _ in tracer.iter[3]:
            module_once.append(model.model.layers[2].self_attn.output[-1])
    with engine.edit("logits") as (tracer, _):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits[-1])
    with engine.edit("samples") as (tracer, _):
        samples = [].save()
        for _ in tracer.all():
            samples.append(model.samples[-1])
    with engine.edit("prompt_only") as (tracer, _):
        prompt_only = [].save()
        prompt_only.append(model.model.layers[1].output[0][-1])
    with engine.edit("steer") as (tracer, _):
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += 0.3
    with engine.edit("changes") as (tracer, _):
        changes = [].save()
        for _ in tracer.iter[:2]:
            changes.append(model.logits[-1])
        for _ in tracer.iter[2:4]:
            changes.append(model.model.norm.output[0][-1])
        for _ in tracer.iter[4:7]:
            changes.append(model.model.layers[0].output[0][-1])
            changes.append(model.logits[-1])
    with engine.edit("stops") as (tracer, _):
        stops = [].save()
        for _ in tracer.all():
            stops.append(model.model.layers[2].output[0][-1])
            if len(stops) == 3:
                tracer.stop()
    with engine.edit("fails") as (tracer, _):
        fails = [].save()
        for _ in tracer.all():
            fails.append(model.model.layers[0].output[0][-1])
            if len(fails) == 3:
                raise ValueError("the third time")
    engine.default_edits = []


def prompt_of(made: random.Random, longest: int) -> list[int]:
    """A prompt of random tokens and length."""
    return [made.randrange(2, 250) for _ in range(made.randint(1, longest))]


def mix(count: int, seed: int, names: Sequence[str] = NAMES, lora: Any = None) -> list[Wanted]:
    """That many requests with edits, lengths, answers and LoRAs drawn at random."""
    made = random.Random(seed)
    found = []
    for _ in range(count):
        sampling: dict[str, Any] = {**GREEDY, "max_tokens": made.randint(1, 12)}
        if made.random() < 0.25:
            sampling |= {"n": 2, "temperature": 1.0, "seed": made.randrange(1000)}
        if made.random() < 0.3 and lora is not None:
            sampling["lora_request"] = lora
        edits = tuple(made.sample(names, made.choice((0, 1, 1, 2, 3))))
        found.append(Wanted(prompt_of(made, 40), edits, sampling))
    return found


def run(engine: Any, wanted: Sequence[Wanted]) -> list[Any]:
    """The outputs of requests that are submitted together."""
    call = Call(
        [engine.request(one.prompt, one.sampling, engine.edits.chosen(list(one.edits))) for one in wanted]
    )
    engine.submit(call)
    engine.wait(call)
    return list(engine.outputs(call))


def different(found: Any, wanted: Any, off_by: float = 1e-3, where: str = "") -> str:
    """Where two values differ by more than ``off_by`` of their size; "" where they do not."""
    if isinstance(wanted, torch.Tensor):
        if found.shape != wanted.shape:
            return f"{where}: {tuple(found.shape)} for {tuple(wanted.shape)}"
        off = float((found.float() - wanted.float()).abs().max()) if found.numel() else 0.0
        size = float(wanted.float().abs().max()) if found.numel() else 0.0
        return f"{where}: off by {off:.3g} of {size:.3g}" if off > off_by * (1 + size) else ""
    if len(found) != len(wanted):
        return f"{where}: {len(found)} for {len(wanted)}"
    pairs = enumerate(zip(found, wanted, strict=True))
    return next((said for i, (a, b) in pairs if (said := different(a, b, off_by, f"{where}[{i}]"))), "")


def rows(found: Any, wanted: Any) -> Iterator[tuple[str, int, Any, Any]]:
    """What two completions saved in lists: name, step, and the value of each, as far as both have it."""
    assert found.saves.blocks == wanted.saves.blocks
    for block in found.saves.blocks:
        saved, alike = found.saves.edit(block), wanted.saves.edit(block)
        assert list(saved) == list(alike)
        for name in saved:
            for index, (one, other) in enumerate(zip(saved[name], alike[name], strict=False)):
                yield name, step_of(name, index), one, other


def step_of(name: str, index: int) -> int:
    """The step that a row of a saved list was read at; 0 is the prompt's."""
    if name == "changes":  # two a step from its fifth row on
        return index if index < 4 else 4 + (index - 4) // 2
    return index + _FIRST.get(name, 0)


def alike(found: Any, wanted: Any) -> int:
    """How many tokens two completions begin with in common."""
    pairs = list(zip(found.token_ids, wanted.token_ids, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def compare(found: Sequence[Any], wanted: Sequence[Any], asked: Sequence[Wanted]) -> None:
    """Every request said, saved and failed the same."""
    wrong = []
    for index, (one, other, request) in enumerate(zip(found, wanted, asked, strict=True)):
        at = f"request {index}, {request.edits}, {request.sampling}"
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            if list(mine.token_ids) != list(theirs.token_ids):
                wrong.append(f"{at}: {mine.token_ids} for {theirs.token_ids}")
            assert mine.saves.blocks == theirs.saves.blocks, at
            for block in mine.saves.blocks:
                saved, like = mine.saves.edit(block), theirs.saves.edit(block)
                assert list(saved) == list(like), at
                said = [different(saved[name], like[name], where=f"{at}: {name}") for name in saved]
                wrong += filter(None, said)
        if (one.error is None) != (other.error is None):
            wrong.append(f"{at}: {one.error} for {other.error}")
    assert not wrong, "\n".join(wrong)

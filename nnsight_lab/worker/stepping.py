"""Runs the steps of an edit in the forward passes of one request, as a hand-written block would.

The rows of a decoder layer are the residual stream. On a fused layer that is ``output[0] + output[1]``: to
add to it, its first part is added to; what puts other rows there goes into the first part, and the second is
zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import block_of
from nnsight_lab.blocks.stubs import block_tracer
from nnsight_lab.errors import EditRefused
from nnsight_lab.steps.check import fitted, stream_sites
from nnsight_lab.steps.positions import Where, where
from nnsight_lab.steps.rows import Prepared
from nnsight_lab.steps.step import Step


class Laid(NamedTuple):
    """A step laid out for running.

    Attributes:
        step: As it was said.
        where: Its positions.
        prepared: What it does, by dtype and device of the rows; filled as it is used.
    """

    step: Step
    where: Where
    prepared: dict[tuple[torch.dtype, torch.device], Prepared]

    def on(self, rows: torch.Tensor) -> Prepared:
        """What it does to rows like these."""
        key = (rows.dtype, rows.device)
        found = self.prepared.get(key)
        if found is None:
            found = self.prepared[key] = Prepared(self.step, rows)
        return found


class Site(NamedTuple):
    """Where steps run.

    Attributes:
        envoy: The module.
        location: As nnsight calls it.
        side: ``input`` or ``output``.
        stream: Whether the rows are the residual stream.
        steps: In their order.
        generated: Whether any of them is about rows of generated tokens.
    """

    envoy: Any
    location: str
    side: str
    stream: bool
    steps: tuple[Laid, ...]
    generated: bool


class Sites(list[Site]):
    """The sites of one edit, in the model's order."""


def steps_block(model: Any, asked: Mapping[str, Any], *, layers: int, hidden: int) -> Block:
    """The block of an edit that was told as steps.

    Args:
        model: The worker's root envoy.
        asked: ``{"steps": (Step, …)}``.
        layers: How many decoder layers the model has.
        hidden: Size of its residual stream.

    Raises:
        EditRefused: They are no steps, or do not fit the model.
    """
    modules = {path: type(one).__name__ for path, one in model._module.named_modules(remove_duplicate=False)}
    steps = fitted(asked.get("steps"), modules, layers=layers, hidden=hidden)
    envoys = {envoy.path: envoy for envoy in model.modules()}
    streams = stream_sites(modules.items(), layers)
    sites = Sites()
    for (path, side), group in groupby(steps, key=lambda step: (step.site, step.side)):
        laid = tuple(Laid(step, where(step.positions), {}) for step in group)
        envoy = envoys.get(f"{model.path}.{path}")
        if envoy is None:
            raise EditRefused(
                f"{path!r} is another name of a module: use the first that the model has for it."
            )
        generated = any(one.where.generated for one in laid)
        sites.append(Site(envoy, f"{envoy.path}.{side}", side, path in streams, laid, generated))
    saved = frozenset(step.name for step in steps if step.op == "read")
    return block_of("steps", saved, steps=sites, tracer=block_tracer(model))


def locations(block: Block) -> list[str]:
    """The locations that a block of steps waits for."""
    return [site.location for site in block.lcls["steps"]]


def run(sites: Sequence[Site], tracer: Any, scope: dict[str, Any]) -> None:
    """Run the steps; what they read is bound in ``scope``, whose names are saved."""
    later = [site for site in sites if site.generated]
    for site in sites:
        for laid in site.steps:
            if laid.step.op == "read" and laid.where.generated:
                scope[laid.step.name] = []
    if not later:
        for site in sites:
            _visit(site, scope, prompt=True)
        return
    for number in tracer.all():
        for site in later if number else sites:
            _visit(site, scope, prompt=not number)


def _visit(site: Site, scope: dict[str, Any], *, prompt: bool) -> None:
    value = site.envoy.output if site.side == "output" else site.envoy.inputs
    parts = _rows_of(value, site)
    for laid in site.steps:
        try:
            _do(laid, parts, scope, prompt=prompt)
        except (IndexError, RuntimeError, ValueError) as error:
            # Ours, and on no line of anybody's: said with the step.
            raise type(error)(f"{laid.step}: {error}") from None


def _do(laid: Laid, parts: Sequence[torch.Tensor], scope: dict[str, Any], *, prompt: bool) -> None:
    step, first = laid.step, parts[0]
    count = first.shape[0]
    if prompt:
        if not laid.where.in_prompt:
            return
        places = laid.where.rows(count)
    elif laid.where.generated:
        places = None
    else:
        return
    if places is not None and not places:
        at: Any = torch.empty(0, dtype=torch.int64, device=first.device)
    else:
        at = slice(None) if places is None else torch.tensor(places, device=first.device)
    if step.op == "read":
        # A copy: later steps of this site change the rows.
        rows = first[at].clone() if len(parts) == 1 else first[at] + parts[1][at]
        if laid.where.generated:
            scope[step.name].append(rows)
        else:
            scope[step.name] = rows
        return
    prepared = laid.on(first)
    given = _given(prepared.tensor, step, at, count, len(places) if places is not None else count)
    if step.op == "add":
        first[at] = prepared.of(first[at], given)
        return
    rows = first[at] if len(parts) == 1 else first[at] + parts[1][at]
    first[at] = prepared.of(rows, given)
    if len(parts) > 1:
        parts[1][at] = 0


def _given(tensor: torch.Tensor | None, step: Step, at: Any, count: int, wanted: int) -> torch.Tensor | None:
    """Of a tensor with a row for each position, those of these positions; else None."""
    if tensor is None or tensor.ndim < 2 or step.op == "project_out":
        return None
    if tensor.shape[0] == wanted:
        return tensor
    if step.op == "patch" and tensor.shape[0] == count:
        return tensor[at]
    whole = f", nor one for each of the prompt's {count}" if step.op == "patch" else ""
    raise ValueError(
        f"the tensor has {tensor.shape[0]} rows, and not one for each of {wanted} positions{whole}"
    )


def _rows_of(value: Any, site: Site) -> tuple[torch.Tensor, ...]:
    """The tensors whose rows these are, ``[token, width]``; two whose sum it is, on a fused decoder layer."""
    found = [one for one in _tensors(value) if one.is_floating_point() and one.ndim >= 2]
    found = [one[0] if one.ndim == 3 and one.shape[0] == 1 else one for one in found]
    if not found:
        raise TypeError(f"the {site.side} of {site.envoy.path!r} has no tensor of rows")
    if site.stream and len(found) > 1 and found[1].shape == found[0].shape:
        return found[0], found[1]
    return (found[0],)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))

"""Steps in the order in which a forward pass reaches their sites.

A block that asks for layer 5 and then for layer 3 waits for ever: the model does not go back. What is known
of the order is that layers run by number, that the parts of a model run as they are listed, and that all of a
module runs between its input and its output. How the parts of a layer follow each other is not (a norm is
listed after the attention that it precedes): there the order is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cmp_to_key

from nnsight_lab.steps.step import Step


def ordered(steps: Sequence[Step], modules: Mapping[str, str]) -> tuple[Step, ...]:
    """Steps as the model reaches them; those of one site as they were given.

    Args:
        steps: Of modules that there are.
        modules: Path -> class name, in the model's order.
    """
    place = {path: number for number, path in enumerate(modules)}
    lists = {path.rpartition(".")[0] for path, kind in modules.items() if kind == "ModuleList"}

    def before(one: Step, other: Step) -> int:
        if one.site == other.site:
            return (one.side == "output") - (other.side == "output")
        if other.site.startswith(f"{one.site}."):
            return 1 if one.side == "output" else -1
        if one.site.startswith(f"{other.site}."):
            return -1 if other.side == "output" else 1
        mine, theirs = one.site.split("."), other.site.split(".")
        shared = next(at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        above = ".".join(mine[:shared])
        if not above or modules.get(above) == "ModuleList" or above in lists:
            return place[".".join(mine[: shared + 1])] - place[".".join(theirs[: shared + 1])]
        return 0

    return tuple(sorted(steps, key=cmp_to_key(before)))

"""What a block captured is each run's own; and the block is read again only where nothing else gives that."""

from __future__ import annotations

import gc
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_lab.blocks.block import Block
from nnsight_lab.worker.captured import Captured

LARGE = 2**18 + 1


class Reader:
    """Reads a block, and counts how often."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.times = 0

    def __call__(self) -> Block:
        self.times += 1
        return Block("", "<test>", 1, {}, self.make())


def captured(make: Any, nbytes: int = 100) -> tuple[Captured, Reader]:
    reader = Reader(make)
    found = Captured(reader, nbytes)
    found.first()
    return found, reader


def test_what_one_run_changes_no_other_run_sees_and_the_block_is_read_once() -> None:
    def make() -> dict[str, Any]:
        return {"rows": [1, [2]], "named": {"a": {3}}, "vector": torch.zeros(4), "pair": (1, [5])}

    found, reader = captured(make)
    first = found.own(alone=False).lcls
    first["rows"].append(9)
    first["rows"][1].clear()
    first["named"]["a"].add(9)
    first["vector"] += 1
    first["pair"][1].append(9)
    second = found.own(alone=True).lcls
    assert torch.equal(second.pop("vector"), torch.zeros(4))
    assert second == {"rows": [1, [2]], "named": {"a": {3}}, "pair": (1, [5])}
    assert reader.times == 1


def test_what_two_names_share_they_share_in_each_run() -> None:
    def make() -> dict[str, Any]:
        rows: list[Any] = []
        rows.append(rows)
        vector = torch.zeros(2)
        return {"rows": rows, "same": rows, "vector": vector, "again": [vector]}

    found, reader = captured(make)
    run = found.own(alone=True).lcls
    assert run["rows"] is run["same"] is run["rows"][0]
    assert run["vector"] is run["again"][0]
    assert reader.times == 1


def test_a_large_tensor_is_shared_until_a_run_has_changed_it() -> None:
    found, reader = captured(lambda: {"weight": torch.zeros(LARGE)})
    with torch.inference_mode():
        first = found.own(alone=False).lcls["weight"]
        assert found.own(alone=False).lcls["weight"] is first
        assert reader.times == 1
        first[3] = 7
        third = found.own(alone=False).lcls["weight"]
        assert third[3] == 0
        third += 1
        assert found.own(alone=True).lcls["weight"].sum() == 0
    assert reader.times == 3


def made_here(name: str, **names: Any) -> FunctionType:
    """A function of no module, as one that travelled."""
    scope = {"__builtins__": __builtins__, **names}
    exec(f"def {name}(x):\n    return seen.append(x)\n", scope)
    return scope[name]  # type: ignore[return-value]


def views() -> dict[str, Any]:
    whole = torch.zeros(4)
    return {"whole": whole, "row": whole[1:]}


@pytest.mark.parametrize(
    ("make", "reads"),
    [
        (lambda: {"square": made_here("square", seen=())}, 1),
        (lambda: {"note": made_here("note", seen=[])}, 3),
        (lambda: {"array": np.zeros(3)}, 3),
        (views, 3),
        (lambda: {"held": Reader(dict)}, 3),
        (lambda: {"np": np, "rows": range(3), "kind": torch.float32, "one": np.float32(1)}, 1),
    ],
    ids=["a pure function", "one that keeps something", "an array", "a view", "an object", "fixed things"],
)
def test_the_block_is_read_for_each_run_where_something_in_it_may_change(make: Any, reads: int) -> None:
    found, reader = captured(make)
    runs = [found.own(alone=True) for _ in range(2)]
    assert reader.times == reads
    if reads > 1:
        for name, value in runs[0].lcls.items():
            assert runs[1].lcls[name] is not value


def test_a_large_object_is_read_once_for_a_call_and_anew_for_the_next() -> None:
    found, reader = captured(lambda: {"array": np.zeros(3)}, nbytes=2**21)
    first, second = found.own(alone=False), found.own(alone=False)
    assert first.lcls["array"] is second.lcls["array"]
    assert reader.times == 2
    assert found.own(alone=True).lcls["array"] is not first.lcls["array"]
    first.lcls["array"][0] = 9
    del first, second
    gc.collect()
    assert found.own(alone=False).lcls["array"][0] == 0

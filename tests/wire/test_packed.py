"""Values that stay in shared memory: what lies there, and that runs of small tensors are moved as one."""

from __future__ import annotations

import pytest
import torch

from nnsight_lab.wire import packed as wire
from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.packed import Layout, Packed, unpack

EXTENT = Extent(path="none", slab_bytes=1 << 20, offset=0, nbytes=1 << 20, rank=0)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def there_and_back(value):
    layout = Layout.of(value, name="x")
    memory = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    layout.copy_into(memory)
    return unpack(layout.packed(EXTENT), lambda _: memory), layout


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 5), (16,), (33, 4)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 4, 50])
def test_a_list_of_tensors_of_one_kind_is_what_it_was(dtype, shape, count):
    values = [(torch.randint(0, 2, shape) + i % 2).to(dtype) for i in range(count)]
    found, _ = there_and_back({"values": values})
    assert len(found["values"]) == count
    for a, b in zip(values, found["values"], strict=True):
        if a.dim() and a.numel():
            assert equal(a.contiguous(), b.contiguous())
        else:
            assert a.shape == b.shape
            assert torch.equal(a.reshape(-1).to(torch.complex64), b.reshape(-1).to(torch.complex64))


def test_runs_are_found_among_tensors_of_other_kinds():
    small = [torch.tensor(float(i)) for i in range(9)]
    rows = [torch.arange(5) + i for i in range(6)]
    strided = [torch.arange(20).view(4, 5).T[i] for i in range(5)]
    value = {"a": small, "b": torch.ones(100, 100), "c": [*rows, small[0], *strided], "d": small[3]}
    found, layout = there_and_back(value)
    runs = [last - first for first, last in wire._alike(layout.sources)]
    assert max(runs) >= 6
    assert sum(runs) == len(layout.sources)
    assert [float(x) for x in found["a"]] == [float(i) for i in range(9)]
    assert torch.equal(found["b"], value["b"])
    assert all(torch.equal(a, b) for a, b in zip(value["c"], found["c"], strict=True))
    assert float(found["d"]) == 3.0


def test_tensors_of_a_run_are_each_ones_own():
    found, _ = there_and_back([torch.tensor([float(i), 0.0]) for i in range(8)])
    found[2] += 1
    found[3].zero_()
    assert [float(x[0]) for x in found] == [0, 1, 3, 0, 4, 5, 6, 7]


@pytest.mark.parametrize("edit", ["offset", "shape", "dtype", "past"])
def test_a_run_that_points_outside_its_piece_is_refused(edit):
    layout = Layout.of([torch.tensor(float(i)) for i in range(8)], name="x")
    message = layout.packed(EXTENT)
    tensors = {
        "offset": message.tensors.replace("[448,", "[450,"),
        "shape": message.tensors.replace("[]", "[99999999]"),
        "dtype": message.tensors.replace("float32", "float99"),
        "past": message.tensors,
    }[edit]
    memory = torch.zeros(layout.nbytes - (64 if edit == "past" else 0), dtype=torch.uint8)
    with pytest.raises(WireError):
        unpack(Packed(message.tree, EXTENT, tensors), lambda _: memory)

"""Values that stay in shared memory: what lies there, and that runs of small tensors are moved as one."""

from __future__ import annotations

import pytest
import torch

from nnsight_lab.errors import CannotTravel
from nnsight_lab.wire import packed as wire
from nnsight_lab.wire.codec import encode
from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.packed import Layout, Packed, unpack
from nnsight_lab.wire.unflatten import unflatten

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


HOSTILE_RUNS = {
    "offset": ("[[0,", "[[2,"),
    "shape": ("[]", "[99999999]"),
    "nothing": ("[]", "[0]"),
    "dtype": ("float32", "float99"),
    "more than there is room for": (",8,4]", ",17,4]"),
    "very many": (",8,4]", ",1000000000000,4]"),
    "none": (",8,4]", ",0,4]"),
    "less than none": (",8,4]", ",-8,4]"),
    "no number": (",8,4]", ",true,4]"),
    "a member more": (",8,4]", ",8,4,4]"),
    "too far apart": (",8,4]", ",8,12]"),
    "one over another": (",8,4]", ",8,0]"),
    "backwards": (",8,4]", ",8,-4]"),
    "between two elements": (",8,4]", ",8,6]"),
    "no distance": (",8,4]", ',8,"4"]'),
}


def test_a_list_of_small_tensors_takes_no_more_room_than_its_numbers():
    found, layout = there_and_back([torch.tensor(float(i)) for i in range(64)])
    assert layout.nbytes == 64 * 4
    assert [float(x) for x in found] == list(map(float, range(64)))


def test_a_run_without_a_distance_lies_as_older_versions_wrote_it():
    memory = torch.zeros(4, 16)
    memory[:, 0] = torch.arange(4.0)
    message = Packed('{"L":[0,4]}', EXTENT, '[[0,"float32",[],4]]')
    assert unpack(message, lambda _: memory.view(-1).view(torch.uint8)) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 5)], ids=str)
def test_what_many_saved_is_unpacked_for_each(dtype, shape):
    steps = torch.randint(0, 2, (3, 7, *shape)).to(dtype)
    once = torch.randint(0, 2, (3, *shape)).to(dtype)
    stack = wire.Stack.of({"steps": steps, "once": once}, {"steps": True, "once": False})
    memory = torch.full((stack.requests * stack.nbytes,), 0xA5, dtype=torch.uint8)
    stack.copy_into(memory)
    if not once.numel():
        return
    form = wire.Form.read(stack.tree, stack.tensors)
    for at in range(3):
        found = form.over(memory[at * stack.nbytes : (at + 1) * stack.nbytes])
        assert list(found) == ["steps", "once"]
        assert equal(found["once"].reshape(-1), once[at].reshape(-1))
        assert len(found["steps"]) == 7
        assert all(
            a.shape == b.shape and equal(a.reshape(-1), b.reshape(-1))
            for a, b in zip(found["steps"], steps[at], strict=True)
        )


@pytest.mark.parametrize(("old", "new"), HOSTILE_RUNS.values(), ids=HOSTILE_RUNS)
def test_a_run_that_points_outside_its_piece_is_refused(old, new):
    layout = Layout.of([torch.tensor(float(i)) for i in range(8)], name="x")
    message = layout.packed(EXTENT)
    assert old in message.tensors
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    with pytest.raises(WireError):
        unpack(Packed(message.tree, EXTENT, message.tensors.replace(old, new)), lambda _: memory)
    with pytest.raises(WireError):
        unpack(message, lambda _: memory[:-64])


@pytest.mark.parametrize(
    "body", ["[0,9]", "[1,8]", "[-1,2]", "[0,-1]", "[9,0]", "[true,2]", "[0,1e0]", "[0]", "8", "null"]
)
def test_a_list_that_names_tensors_that_are_not_there_is_refused(body):
    layout = Layout.of([torch.tensor(float(i)) for i in range(8)], name="x")
    message = layout.packed(EXTENT)
    assert message.tree == '{"L":[0,8]}'
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    with pytest.raises(WireError):
        unpack(Packed(f'{{"L":{body}}}', EXTENT, message.tensors), lambda _: memory)


def test_a_message_of_the_codec_has_no_runs():
    value = [torch.tensor(float(i)) for i in range(8)]
    assert b'"L"' not in encode(value)
    with pytest.raises(WireError, match="run of tensors"):
        unflatten({"L": [0, 1]}, lambda handle: value[0])


ODD_LISTS = {
    "twice the same": lambda x: [x[0], x[1], x[0], x[2], x[3]],
    "two dtypes": lambda x: [*x, x[0].double()],
    "two shapes": lambda x: [*x, torch.zeros(3)],
    "with a gradient": lambda x: [*x, torch.zeros(2, requires_grad=True)],
    "a parameter": lambda x: [*x, torch.nn.Parameter(torch.zeros(2))],
    "negated views": lambda x: [(one * 1j).conj().imag for one in x],
    "conjugated": lambda x: [(one * 1j).conj() for one in x],
    "strided": lambda x: [torch.zeros(2, 4)[:, i] + i for i in range(4)] + [torch.ones(2, 4)[:, 0]],
    "expanded": lambda x: [torch.tensor(float(i)).expand(2) for i in range(5)],
    "views of one": lambda x: list(torch.arange(10.0).view(5, 2)),
    "something else between": lambda x: [*x[:2], "and", *x[2:]],
    "three": lambda x: x[:3],
    "empty ones": lambda x: [torch.zeros(0) for _ in range(6)],
    "large ones": lambda x: [torch.full((5000,), float(i)) for i in range(5)],
    "half precision": lambda x: [one.bfloat16() for one in x],
    "in a list in a dict": lambda x: {"a": [[*x], x[1]], "b": (x, [x[2]])},
}


@pytest.mark.parametrize("make", ODD_LISTS.values(), ids=ODD_LISTS)
def test_lists_of_tensors_come_back_as_they_were_whatever_is_in_them(make):
    value = make([torch.tensor([float(i), -float(i)]) for i in range(6)])
    found, _ = there_and_back(value)

    def same(a, b):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a.detach(), b)
        elif isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                same(a[key], b[key])
        elif isinstance(a, list | tuple):
            assert type(a) is type(b)
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                same(x, y)
        else:
            assert a == b

    same(value, found)
    if isinstance(value, list):
        assert [[y is x for y in found].index(True) for x in found] == [
            [y is x for y in value].index(True) for x in value
        ]


def test_a_list_of_tensors_whose_memory_is_gone_is_refused():
    value = [torch.arange(64.0) for _ in range(6)]
    value[4].untyped_storage().resize_(8)
    with pytest.raises(CannotTravel, match=r"x\[4\].*memory was freed"):
        Layout.of(value, name="x")

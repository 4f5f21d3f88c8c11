"""What goes in comes out: by type, by bytes, and with the same objects shared."""

from __future__ import annotations

import math
import pickle
import struct
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_lab.wire.codec import decode, encode, encode_parts, flatten, size_of, unflatten
from nnsight_lab.wire.limits import ALIGNMENT, MAX_DEPTH
from nnsight_lab.wire.tensors import ALL_DTYPES, DTYPES
from tests.wire.codec_values import assert_same, bits, keys, tensors, values

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
slow_to_draw = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@slow_to_draw
@given(values)
def test_any_value_arrives_exactly_from_read_only_and_from_writable_bytes(value: Any) -> None:
    data = encode(value)
    assert_same(value, decode(data))
    assert_same(value, decode(bytearray(data)))
    assert b"".join(encode_parts(value)) == data


@slow_to_draw
@given(values)
def test_encoding_what_was_decoded_gives_a_message_of_the_same_size(value: Any) -> None:
    data = encode(value)
    assert len(encode(decode(data))) == len(data)


@slow_to_draw
@given(values)
def test_tensors_can_be_kept_by_somebody_else_while_the_tree_travels_as_json(value: Any) -> None:
    kept: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> dict[str, Any]:
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        kept.append(tensor.clone(memory_format=torch.contiguous_format))
        return {"slab": "s0", "at": len(kept) - 1}

    node = flatten(value, put)
    assert_same(value, unflatten(node, lambda handle: kept[handle["at"]]))  # type: ignore[index]


@slow_to_draw
@given(values)
def test_size_of_is_what_the_tensors_take_in_the_message(value: Any) -> None:
    kept: list[int] = []

    def put(tensor: torch.Tensor) -> int:
        kept.append(tensor.nbytes)
        return 0

    flatten(value, put)
    assert size_of(value) == sum(kept)


@slow_to_draw
@given(st.dictionaries(keys, st.integers(), max_size=4))
def test_keys_keep_their_type_and_order(value: dict[Any, int]) -> None:
    assert_same(value, decode(encode(value)))


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5), (1, 1)])
def test_every_dtype_arrives_in_every_shape_down_to_the_last_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    count = math.prod(shape)
    raw = torch.randint(0, 2 if name == "bool" else 256, (max(count, 1) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)[:count].reshape(shape)
    assert_same([tensor, dtype], decode(encode([tensor, dtype])))


@pytest.mark.parametrize("dtype", sorted(ALL_DTYPES))
def test_a_dtype_is_a_value_too(dtype: str) -> None:
    assert decode(encode(ALL_DTYPES[dtype])) is ALL_DTYPES[dtype]


def test_nan_payloads_and_minus_zero_survive() -> None:
    nans = [struct.unpack(">d", bytes.fromhex(raw))[0] for raw in ("7ff8000000000123", "fff8000000000001")]
    floats = [*nans, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]
    assert_same(floats, decode(encode(floats)))
    assert_same(complex(-0.0, nans[0]), decode(encode(complex(-0.0, nans[0]))))
    payloads = torch.tensor([0x7FC00123, -0x3FEDCC], dtype=torch.int32).view(torch.float32)
    assert_same(payloads, decode(encode(payloads)))


def test_lone_surrogates_are_kept_apart_from_the_character_they_would_make() -> None:
    for text in ("\ud83d\ude00", "\U0001f600", "a\udcff", "\ud800"):
        assert decode(encode(text)) == text
        assert decode(encode({text: text})) == {text: text}


def test_an_int_longer_than_python_prints_arrives() -> None:
    assert decode(encode([10**5000, -(10**5000), 2**64, -(2**64), 2**64 - 1])) == [
        *(10**5000, -(10**5000), 2**64, -(2**64), 2**64 - 1)
    ]


def test_only_a_views_own_elements_travel() -> None:
    buffer = torch.zeros(1000, 1000)
    assert size_of(buffer[3]) == 4000
    assert len(encode(buffer[3])) < 5000
    assert size_of(torch.zeros(1).expand(10)) == 40  # as large as it looks


def test_a_gradient_a_parameter_and_a_pending_conjugation_become_plain_numbers() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    conj = torch.randn(3, dtype=torch.complex64).conj()
    neg = torch.randn(3, dtype=torch.complex64).conj().imag
    assert conj.is_conj()
    assert neg.is_neg()
    got = decode(encode([weight, weight * 2, conj, neg]))
    assert [type(tensor) for tensor in got] == [torch.Tensor] * 4
    assert not any(tensor.requires_grad or tensor.is_conj() or tensor.is_neg() for tensor in got)
    assert torch.equal(got[0], weight.detach())
    assert torch.equal(got[2], conj)
    assert torch.equal(got[3], neg)


def test_the_same_object_under_two_names_is_one_object_again() -> None:
    tensor, items, array, data = torch.randn(4), [1, 2], np.ones(3), b"x" * 1000
    value = {"a": tensor, "b": tensor, "c": items, "d": (items,), "e": [array, array], "f": [data, data]}
    got = decode(encode(value))
    assert got["a"] is got["b"]
    assert got["c"] is got["d"][0]
    assert got["e"][0] is got["e"][1]
    assert got["f"][0] is got["f"][1]
    assert size_of(value) == 16 + 24 + 1000


def test_a_tensor_is_one_object_inside_and_outside_of_a_set() -> None:
    tensor = torch.randn(2)
    got = decode(encode([{tensor}, tensor, {tensor}]))
    assert got[0] == {got[1]} == got[2]


def test_two_views_of_one_storage_are_two_tensors() -> None:
    whole = torch.zeros(4)
    one, two = decode(encode([whole[:], whole[:]]))
    one += 1
    assert two.sum() == 0


def test_tensors_are_writable_and_share_memory_only_with_writable_bytes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = encode({"t": torch.zeros(4), "a": np.zeros(4)})
        got = decode(data)
        got["t"] += 1
        got["a"] += 1
        assert decode(data)["t"].sum() == 0
        writable = bytearray(data)
        decode(writable)["t"][0] = 7
        assert decode(writable)["t"][0] == 7
        assert decode(memoryview(writable).toreadonly())["t"][0] == 7


def test_a_message_at_an_odd_address_is_read_into_memory_of_its_own() -> None:
    data = encode(torch.arange(5.0))
    shifted = bytearray(b"x" + data)
    tensor = decode(memoryview(shifted)[1:])
    assert tensor.data_ptr() % 8 == 0
    assert torch.equal(tensor, torch.arange(5.0))


def test_every_tensor_lies_at_a_multiple_of_the_alignment() -> None:
    data = bytearray(encode([torch.arange(n, dtype=torch.uint8) for n in (1, 64, 65, 0, 3)]))
    base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert all((t.data_ptr() - base) % ALIGNMENT == 0 for t in decode(data) if t.numel())


def test_a_decoded_tensor_pickles_as_itself_and_not_as_the_whole_message() -> None:
    first = decode(bytearray(encode([torch.zeros(4), torch.zeros(100_000)])))[0]
    assert len(pickle.dumps(first)) < 2000


def test_nesting_up_to_the_limit_arrives() -> None:
    value: Any = torch.ones(1)
    for depth in range(MAX_DEPTH):
        value = (value,) if depth % 2 else {"in": value}
    assert_same(value, decode(encode(value)))


def test_one_list_nested_in_itself_many_times_over_stays_small() -> None:
    value: list[Any] = [torch.ones(1)]
    for _ in range(60):
        value = [value, value]
    got = decode(encode(value))
    assert got[0] is got[1]
    assert len(encode(value)) < 2000


def test_a_memmap_is_an_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    got = decode(encode(mapped))
    assert type(got) is np.ndarray
    assert got.tolist() == [1, 2, 3]
    mapped._mmap.close()  # type: ignore[attr-defined]


@slow_to_draw
@given(st.lists(tensors(), max_size=5))
def test_a_message_of_tensors_holds_their_bytes_and_little_else(sent: list[torch.Tensor]) -> None:
    data = encode(sent)
    assert sum(len(bits(tensor)) for tensor in sent) <= len(data)
    assert len(data) <= sum(len(bits(tensor)) for tensor in sent) + 200 * (len(sent) + 1)


def test_importing_the_room_or_its_messages_does_not_load_torch() -> None:
    check = "import sys, nnsight_lab.wire, nnsight_lab.wire.messages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

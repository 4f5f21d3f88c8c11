"""Labels: one per tensor, and everything known of it but its data."""

from __future__ import annotations

import dataclasses
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import SavesError
from nnsight_lab.saves.label import SaveKey, SaveLabel, labels_of
from nnsight_lab.wire.codec import Record, decode, encode

COMMON: dict[str, Any] = {"request_id": "r1", "name": "hidden", "block": "probe", "created": 1.0}


def paths(value: object) -> list[str]:
    return [label.path for label in labels_of(value)]


def test_a_tensor_has_one_label_with_its_shape_dtype_and_bytes() -> None:
    (label,) = labels_of(torch.zeros(3, 4, dtype=torch.bfloat16), **COMMON)
    assert (label.kind, label.shape, label.dtype, label.bytes) == ("tensor", (3, 4), "bfloat16", 24)
    assert (label.path, label.step) == ("", None)
    assert label.key == SaveKey("r1", 0, "probe", "hidden", "")


def test_a_list_that_a_block_appended_to_has_a_label_per_step() -> None:
    labels = labels_of([{"x": torch.zeros(2), "y": [torch.zeros(1)]} for _ in range(3)])
    assert [(label.path, label.step) for label in labels[:3]] == [
        ("[0]['x']", 0),
        ("[0]['y'][0]", 0),
        ("[1]['x']", 1),
    ]
    assert len(labels) == 6


def test_a_list_inside_another_value_is_no_list_of_steps() -> None:
    assert [label.step for label in labels_of({"layers": [torch.zeros(1), torch.zeros(1)]})] == [None, None]
    assert [label.step for label in labels_of((torch.zeros(1), torch.zeros(1)))] == [None, None]


@pytest.mark.parametrize(
    ("value", "kind", "dtype"),
    [
        (3.5, "scalar", "float"),
        (True, "scalar", "bool"),
        (np.float32(1), "scalar", "float32"),
        ("text", "text", "str"),
        (None, "tree", "NoneType"),
        ([1, 2, 3], "tree", "list"),
        ({"a": ["b"]}, "tree", "dict"),
        (Record("Probe", {"x": 1}), "tree", "Probe"),
    ],
)
def test_a_value_without_tensors_has_one_label_as_a_whole(value: object, kind: str, dtype: str) -> None:
    (label,) = labels_of(value)
    assert (label.kind, label.dtype, label.shape, label.bytes, label.path) == (kind, dtype, (), 0, "")


def test_what_lies_beside_tensors_is_labelled_in_parts_as_large_as_they_come() -> None:
    value = {"loss": 1.5, "ids": list(range(10_000)), "text": "x", "h": torch.zeros(2)}
    labels = labels_of(value)
    assert [(label.path, label.kind) for label in labels] == [
        ("['loss']", "scalar"),
        ("['ids']", "tree"),
        ("['text']", "text"),
        ("['h']", "tensor"),
    ]


def test_an_array_is_labelled_with_its_own_dtype() -> None:
    little, big = labels_of([np.zeros((2, 0), "<f4"), np.zeros(3, ">c8")])
    assert (little.kind, little.shape, little.dtype, little.bytes) == ("array", (2, 0), "float32", 0)
    assert (big.dtype, big.bytes) == (">c8", 24)


def test_fields_and_set_members_have_paths_too() -> None:
    Pair = namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Probe:
        score: torch.Tensor

    tensor = torch.zeros(1)
    assert paths(Record("Probe", {"score": tensor})) == [".score"]
    assert paths(Probe(tensor)) == [".score"]
    assert paths(Pair(tensor, 1)) == [".left", ".right"]
    assert paths(torch.ones(2, 3).topk(1)) == [".values", ".indices"]
    assert paths({tensor}) == ["{0}"]


trees = st.recursive(
    st.builds(torch.zeros, st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, min_size=1, max_size=3)
    ),
)


@settings(deadline=None)
@given(trees)
def test_a_path_is_python_that_reads_the_tensor_from_the_value(value: object) -> None:
    found = [eval(f"value{path}", {"value": value}) for path in paths(value)]
    assert found
    assert all(isinstance(tensor, torch.Tensor) for tensor in found)
    assert [tensor.shape for tensor in found] == [label.shape for label in labels_of(value)]


def test_a_label_is_frozen_hashable_and_travels() -> None:
    (label,) = labels_of(
        [torch.zeros(2)], sampling={"temperature": 0.0}, edits=(("probe", 2, "..."),), **COMMON
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        label.name = "other"  # type: ignore[misc]
    assert hash(label) == hash(dataclasses.replace(label))
    assert decode(encode(label)) == label
    assert not any(isinstance(getattr(label, f.name), torch.Tensor) for f in dataclasses.fields(SaveLabel))


def test_a_value_that_refers_to_itself_or_folds_up_small_ends_in_an_error_not_in_a_walk_without_end() -> None:
    loop: list[object] = [torch.zeros(1)]
    loop.append(loop)
    with pytest.raises(SavesError, match="contains itself"):
        labels_of(loop)
    folded: list[object] = [torch.zeros(1)]
    for _ in range(60):
        folded = [folded, folded]
    with pytest.raises(SavesError, match="more than"):
        labels_of(folded)
    plain: list[object] = []
    for _ in range(60):
        plain = [plain, plain]
    began = time.perf_counter()
    assert len(labels_of(plain)) == 1
    assert time.perf_counter() - began < 1

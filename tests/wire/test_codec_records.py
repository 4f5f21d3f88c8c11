"""Objects with names arrive as records, and read as the objects did."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from transformers.utils.generic import ModelOutput

from nnsight_lab.wire.codec import Record, decode, encode


@dataclass
class Probe:
    name: str
    scores: torch.Tensor
    inner: Any = None
    _hidden: int = 3
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: int


class Point(NamedTuple):
    x: int
    y: torch.Tensor


@dataclass
class Output(ModelOutput):  # type: ignore[misc]
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None


def travelled(value: Any) -> Any:
    return decode(encode(value))


def test_a_dataclass_keeps_its_names_and_nesting() -> None:
    got = travelled({"p": Probe("a", torch.ones(2), inner=[Slotted(7)], tags=["t"])})["p"]
    assert type(got) is Record
    assert got.name == got["name"] == got.fields["name"] == "a"
    assert torch.equal(got.scores, torch.ones(2))
    assert got.inner[0].x == 7
    assert got._hidden == 3
    assert got._type_name == "Probe"
    assert repr(got.inner[0]) == "Slotted(x=7)"
    assert list(got) == list(dict(got)) == ["name", "scores", "inner", "_hidden", "tags"]
    assert "name" in got
    assert "other" not in got
    assert len(got) == 5


def test_a_namedtuple_can_be_unpacked_indexed_and_read_by_name() -> None:
    got = travelled(Point(1, torch.ones(2)))
    x, y = got
    assert x == got.x == got[0] == got["x"] == 1
    assert y is got.y is got[-1]
    assert got[:1] == (1,)


def test_what_torch_returns_from_topk_reads_as_before() -> None:
    got = travelled(torch.topk(torch.tensor([3.0, 1.0, 2.0]), 2))
    assert got.values.tolist() == [3.0, 2.0]
    values, indices = got
    assert values is got.values
    assert indices.tolist() == [0, 2]


def test_a_model_output_arrives_with_its_empty_fields_and_its_additions() -> None:
    output = Output(logits=torch.ones(1))
    output["extra"] = torch.zeros(1)
    got = travelled(output)
    assert got.logits is got["logits"]
    assert got.hidden is None
    assert got.extra.tolist() == [0.0]


def test_fields_named_like_methods_win() -> None:
    Cache = namedtuple("Cache", "keys values fields")
    got = travelled(Cache(1, 2, 3))
    assert (got.keys, got.values, got.fields) == (1, 2, 3)
    assert pickle.loads(pickle.dumps(got)) == got
    assert repr(got) == "Cache(keys=1, values=2, fields=3)"


def test_a_field_cannot_pose_as_something_of_pythons() -> None:
    got = Record("Fake", {"__class__": int, "__len__": 3, "_repr_html_": "<script>"})
    assert got.__class__ is Record
    assert len(got) == 3
    with pytest.raises(AttributeError):
        got.__array__


def test_a_record_is_read_only_and_says_which_fields_it_has() -> None:
    got = travelled(Slotted(1))
    with pytest.raises(AttributeError, match="read-only"):
        got.x = 2
    with pytest.raises(AttributeError, match="read-only"):
        del got.x
    with pytest.raises(TypeError):
        got.fields["x"] = 2
    with pytest.raises(AttributeError, match="no field 'y'; it has x"):
        got.y
    with pytest.raises(KeyError):
        got[0]
    with pytest.raises(TypeError, match="unhashable"):
        hash(got)


def test_records_are_equal_by_value_and_survive_pickle_copy_and_another_journey() -> None:
    got = travelled(Probe("a", torch.ones(2), inner={"deep": (torch.zeros(1), [1.5])}))
    for other in (pickle.loads(pickle.dumps(got)), copy.copy(got), copy.deepcopy(got), travelled(got)):
        assert other == got
        assert other._type_name == "Probe"
    assert got != travelled(Probe("a", torch.ones(2).double(), inner=got.inner))
    assert got != travelled(Probe("b", torch.ones(2), inner=got.inner))
    assert got != 3
    assert travelled(Point(1, torch.ones(1))) != Record("Point", {"x": 1, "y": torch.ones(1)})


def test_the_same_object_under_two_names_is_one_record() -> None:
    probe = Probe("a", torch.ones(2))
    first, second, tensor = travelled([probe, probe, probe.scores])
    assert first is second
    assert tensor is first.scores

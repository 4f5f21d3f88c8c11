"""What cannot leave the worker is refused by path, type, reason and cure."""

from __future__ import annotations

import enum
import io
import pathlib
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_lab.errors import CannotTravel
from nnsight_lab.wire.codec import decode, encode, size_of
from nnsight_lab.wire.limits import MAX_DEPTH


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Kind(str, enum.Enum):
    MLP = "mlp"


class Plain:
    """A class that only has attributes."""


class Tagged(dict):  # type: ignore[type-arg]
    """A dict that can carry attributes."""


def refusal(value: Any) -> str:
    with pytest.raises(CannotTravel) as caught:
        encode(value, name="saves")
    with pytest.raises(CannotTravel) as measured:
        size_of(value, name="saves")
    assert str(measured.value) == str(caught.value)
    return str(caught.value)


def test_the_message_names_the_path_the_type_and_the_cure() -> None:
    assert refusal({"probe": {"fn": lambda: 0}}) == (
        'saves["probe"]["fn"] is a function: code does not travel. Save its data instead: what it returns.'
    )


def test_the_path_goes_through_every_kind_of_container() -> None:
    @dataclass
    class Probe:
        found: Any

    assert refusal([0, {"a": (1, {7: Probe([Plain()])})}]).startswith(
        f'saves[1]["a"][1][7].found[0] is a {__name__}.Plain: '
    )
    assert refusal({"x": {("k", Plain())}}).startswith('saves["x"] (in the set) is a ')
    assert refusal({"x": {Colour.RED: 1}}).startswith('saves["x"] (a key) is a ')


#: Made when the test runs, as some of them warn.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "builtin": (lambda: len, "what it returns"),
    "method": (lambda: [].append, "what it returns"),
    "torch function": (lambda: torch.nn.functional.relu, "what it returns"),
    "nn.Module": (lambda: torch.nn.Linear(1, 1), "`.weight`"),
    "class": (lambda: torch.nn.Linear, "its name"),
    "module": (lambda: torch, "its name"),
    "generic alias": (lambda: list[int], "its name"),
    "enum": (lambda: Colour.RED, "`.value`"),
    "generator": (lambda: (n for n in range(3)), "`list(...)`"),
    "iterator": (lambda: iter([]), "`list(...)`"),
    "dict view": (lambda: {}.keys(), "`list(...)`"),
    "deque": (lambda: deque([1]), "`list(...)`"),
    "mapping": (lambda: ChainMap(), "`dict(...)`"),
    "file": (lambda: io.BytesIO(), "`.read()`"),
    "error": (lambda: ValueError("x"), "`str(error)`"),
    "path": (lambda: pathlib.Path("x"), "`str(...)`"),
    "numpy dtype": (lambda: np.dtype("f4"), "`str(...)`"),
    "bytearray": (lambda: bytearray(b"x"), "`bytes(...)`"),
    "object": (lambda: object(), "a dict of its tensors"),
    "structured array": (lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]), "array['a']"),
    "array of text": (lambda: np.array(["x"]), "tolist"),
    "array of objects": (lambda: np.array([None]), "tolist"),
    "array of dates": (lambda: np.array(["2020-01-01"], "M8[D]"), "int64"),
    "numpy date": (lambda: np.datetime64("2020-01-01"), "int64"),
    "long double": (lambda: np.zeros(2, np.longdouble), "float64"),
    "masked array": (lambda: np.ma.masked_array([1], [True]), "`.mask`"),
    "array subclass": (lambda: np.zeros(2).view(np.recarray), "numpy.asarray"),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), "`.to_dense()`"),
    "quantized tensor": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        "`.dequantize()`",
    ),
    "meta tensor": (lambda: torch.ones(2, device="meta"), "`.shape`"),
    "many dimensions": (lambda: torch.ones([1] * 65), "`.flatten()`"),
    "nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided),
        "`.unbind()`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_each_kind_of_thing_has_a_cure_of_its_own(name: str) -> None:
    make, cure = REFUSED[name]
    message = refusal([make()])
    assert message.startswith("saves[0] ")
    assert "ave " in message
    assert cure in message
    assert "\n" not in message


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_wrapper_tensor_is_refused_since_its_memory_is_not_its_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode  # only here: a private module of torch

    with FakeTensorMode():
        fake = torch.ones(2)
    assert "FakeTensor" in refusal([fake])


def test_an_object_that_answers_every_attribute_is_still_refused() -> None:
    class Answers:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: self

    Answers.__module__ = "nnsight.intervention.envoy"
    assert "`.output` or `.input`" in refusal({"layer": Answers()})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"back": loop})
    assert refusal({"loop": loop}).startswith('saves["loop"][1]["back"] contains itself')


def test_nesting_beyond_the_limit_is_refused() -> None:
    value: Any = []
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    assert "containers deep" in refusal(value)
    for _ in range(100_000):
        value = [value]
    assert "deep" in refusal(value)
    key: Any = ()
    for _ in range(MAX_DEPTH + 1):
        key = (key,)
    assert "keys, and members of sets" in refusal({key: 1})


def test_a_field_that_was_never_set_is_refused_by_name() -> None:
    @dataclass(init=False)
    class Half:
        done: int

    assert refusal([Half()]).startswith("saves[0].done was declared and never set")


def test_members_of_int_and_str_enums_travel_as_their_value() -> None:
    got = decode(encode([Level.HIGH, Kind.MLP, {Kind.MLP: Level.HIGH}]))
    assert got == [3, "mlp", {"mlp": 3}]
    assert [type(item) for item in got] == [int, str, dict]
    assert type(next(iter(got[2]))) is str


def test_subclasses_of_plain_types_travel_as_the_plain_type() -> None:
    class Text(str):
        __slots__ = ()

    class Number(float):
        __slots__ = ()

    value = [OrderedDict(a=1), Counter("aab"), defaultdict(list, {"x": [1]}), Text("t"), Number(1.5)]
    value += [np.str_("s"), np.bytes_(b"b")]
    got = decode(encode(value))
    assert got == [{"a": 1}, {"a": 2, "b": 1}, {"x": [1]}, "t", 1.5, "s", b"b"]
    assert [type(item) for item in got] == [dict, dict, dict, str, float, str, bytes]


def test_a_subclass_whose_attributes_would_be_lost_is_refused() -> None:
    tagged = Tagged(a=1)
    assert decode(encode(tagged)) == {"a": 1}
    tagged.origin = "layer 3"  # type: ignore[attr-defined]
    assert "origin" in refusal(tagged)


def test_a_dict_that_lies_about_its_items_travels_as_what_it_holds() -> None:
    class Lies(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise AssertionError("asked")

    assert decode(encode(Lies(a=1))) == {"a": 1}


def test_a_key_that_is_a_namedtuple_or_a_tensor_is_refused() -> None:
    assert "keys, and members of sets" in refusal({torch.ones(1): 1})
    assert "keys, and members of sets" in refusal({(1, torch.ones(1)): 1})
    assert "keys, and members of sets" in refusal({torch.topk(torch.ones(1), 1)})

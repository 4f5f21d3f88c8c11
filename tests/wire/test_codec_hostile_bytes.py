"""Whatever the bytes say, reading them ends in a value or a `WireError`, and in little memory."""

from __future__ import annotations

import builtins
import contextlib
import json
import subprocess
import sys
import textwrap
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import LabError
from nnsight_lab.wire.codec import Record, WireError, decode, encode, unflatten
from nnsight_lab.wire.limits import MAGIC, VERSION, aligned
from nnsight_lab.wire.messages import Frame, RequestRecord, WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def message(
    value: Any, tensors: list[Any] | None = None, data: bytes = b"", raw: bytes | None = None
) -> bytes:
    """A message with any header, well formed or not."""
    header = json.dumps({"tensors": tensors or [], "value": value}).encode() if raw is None else raw
    head = MAGIC + bytes([VERSION]) + len(header).to_bytes(8, "little") + header
    return head.ljust(aligned(len(head)) if tensors else 0, b"\0") + data


def small() -> bytes:
    shared = [1, "é"]
    return encode(
        {
            "t": torch.arange(3, dtype=torch.bfloat16),
            "a": np.arange(2.0),
            "s": {1, (2, b"x")},
            "n": np.float32(2),
            "l": [shared, shared, slice(0, 1), 1j, 2**70, float("nan"), torch.float16],
            "e": WorkerError("E", "m", (Frame("f", 1, "g"),), requested=(("x", 1),)),
            "r": Record("Probe", {"x": torch.Size([1])}),
        }
    )


def outcome(data: bytes) -> str:
    try:
        decode(data)
    except WireError:
        return "refused"
    return "read"


def test_a_message_cut_off_anywhere_is_refused() -> None:
    data = small()
    assert outcome(data) == "read"
    assert {outcome(data[:end]) for end in range(len(data))} == {"refused"}
    assert outcome(data + b"\0") == "refused"


def test_no_flipped_byte_does_more_than_change_the_value_or_be_refused() -> None:
    data = small()
    for position in range(len(data)):
        for mask in (1, 2, 8, 32, 128, 255):
            flipped = bytearray(data)
            flipped[position] ^= mask
            outcome(bytes(flipped))


def test_the_wire_error_is_one_of_ours() -> None:
    assert issubclass(WireError, LabError)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (b"\x80\x04K\x01.".ljust(40, b"."), "no message"),
        (MAGIC + b"\x63" + bytes(8), "format 99"),
        (MAGIC + bytes([VERSION]) + b"\xff" * 8, "claims a header"),
        (MAGIC + bytes([VERSION]) + (1000).to_bytes(8, "little"), "cut off"),
        (message(None, raw=b"\xff\xfe"), "cannot be read"),
        (message(None, raw=b"{"), "cannot be read"),
        (message(None, raw=b"[]"), "lacks"),
        (message(None, raw=b'{"value": NaN, "tensors": []}'), "NaN"),
        (message(None, raw=b'{"value": 1%s, "tensors": []}' % (b"0" * 5000)), "cannot be read"),
        (message(None, raw=b'{"value": %s, "tensors": []}' % (b"[" * 100_000)), "deep"),
        (message(None, raw=b'{"value": %s%s, "tensors": []}' % (b"[" * 300, b"]" * 300)), "deep"),
        (message({"T": 0}), "no tensor"),
        (message({"T": -1}, [[0, "uint8", [1]]], b"x"), "no tensor"),
        (message({"T": True}, [[0, "uint8", [1]]], b"x"), "handle"),
        (message([{"T": 0}, {"T": 0}], [[0, "uint8", [1]]], b"x"), "two places"),
        (message({"T": 0}, [[0, "uint8", [2**50]]], b"x"), "should have"),
        (message({"T": 0}, [[0, "float32", [2**62]]], b"x"), "no tensor can have"),
        (message({"T": 0}, [[0, "float32", [2**40] * 60]], b"x"), "no tensor can have"),
        (message({"T": 0}, [[0, "float32", [0, 2**62, 2**62]]]), "no tensor can have"),
        (message({"T": 0}, [[0, "uint8", [1] * 65]], b"x"), "at most 64"),
        (message({"T": 0}, [[0, "uint8", [-1]]], b"x"), "zero or more"),
        (message({"T": 0}, [[0, "uint8", [1.0]]], b"x"), "zero or more"),
        (message({"T": 0}, [[0, "uint8", [True]]], b"x"), "zero or more"),
        (message({"T": 0}, [[-64, "uint8", [1]]], b"x"), "belongs at 0"),
        (message({"T": 0}, [[64, "uint8", [1]]], b"x"), "belongs at 0"),
        (message({"T": 0}, [[0, "uint8", [1]], [0, "uint8", [1]]], b"x"), "belongs at 64"),
        (message({"T": 0}, [[0, "float7", [1]]], b"x"), "float7"),
        (message({"T": 0}, [[0, "load", [1]]], b"x"), "load"),
        (message({"T": 0}, [[0, "qint8", [1]]], b"x"), "qint8"),
        (message({"T": 0}, [[0, "uint8"]], b"x"), "describes"),
        (message({"@": 0}), "not before it"),
        (message([{"@": 0}]), "not before it"),
        (message({"?": 0}), "unknown form"),
        (message({"t": [], "d": {}}), "where a value belongs"),
        (message({"e": [[1]]}), "where a value belongs"),
        (message({"m": [[[1], 2]]}), "where a value belongs"),
        (message({"m": [[1, 2], [1.0, 3]]}), "twice"),
        (message({"y": "nn"}), "dtype"),
        (message({"v": "os.system"}), "device"),
        (message({"v": "nonsense"}), "device"),
        (message({"n": ["|O8", "00" * 8]}), "dtype"),
        (message({"n": ["<f4", "00"]}), "4 bytes"),
        (message({"N": [0, "|O8", [1]]}, [[0, "uint8", [8]]], b"x" * 8), "dtype"),
        (message({"N": [0, "<f4", [3]]}, [[0, "uint8", [8]]], b"x" * 8), "12 bytes"),
        (message({"N": [0, "<f4", [2]]}, [[0, "float32", [2]]], b"x" * 8), "where bytes belong"),
        (message({"r": [0, 1, 0]}), "stands still"),
        (message({"z": [2**70]}), "torch.Size"),
        (message({"i": "1_0"}), "hex"),
        (message({"f": "00"}), "8 bytes"),
        (message({"s": "ff"}), "UTF-8"),
        (message({"C": ["Popen", {"args": "ls"}]}), "does not know"),
        (message({"C": ["Frame", {"filename": "f"}]}), "different versions"),
        (
            message({"C": ["Frame", {"filename": "f", "lineno": 1, "function": "g", "x": 1}]}),
            "unknown fields",
        ),
        (
            message({"C": ["Frame", {"filename": "f", "lineno": "1", "function": "g"}]}),
            "Frame.lineno is a str",
        ),
    ],
)
def test_each_lie_is_refused_for_what_it_is(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(data)
    with pytest.raises(WireError, match=reason):
        decode(bytearray(data))


def test_a_claim_of_a_huge_tensor_allocates_nothing() -> None:
    lies = [
        message({"T": 0}, [[0, "float32", [2**40]]], b"x" * 64),
        message({"T": 0}, [[0, "float32", [2**20, 2**20]]], b"x" * 64),
        message({"N": [0, "<f8", [2**40]]}, [[0, "uint8", [8]]], b"x" * 8),
        MAGIC + bytes([VERSION]) + (2**40).to_bytes(8, "little"),
        message({"r": [0, 10**18, 1]}),
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            outcome(lie)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_references_cannot_make_hashing_endless() -> None:
    bomb: list[Any] = [{"t": []}, *({"t": [{"@": n}, {"@": n}]} for n in range(80))]
    for last in ({"e": [{"@": 80}]}, {"m": [[{"@": 80}, 1]]}, {"E": [{"t": [{"@": 80}]}]}):
        started = time.monotonic()
        assert outcome(message([*bomb, last])) == "refused"
        assert time.monotonic() - started < 5  # 2**80 steps otherwise


tags = st.sampled_from([*"@ifscbBteEdmrSzyvTnNCR"])
atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
known = st.sampled_from(["bfloat16", "<f4", "cpu", "00", "Frame", "RequestRecord", 0, 1, 2, -1, "lineno"])
trees = st.recursive(
    atoms | known,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2) | tags, inner, max_size=2)
        | st.tuples(tags, inner).map(lambda pair: dict([pair]))
        | st.tuples(tags, st.lists(inner, max_size=3)).map(lambda pair: dict([pair]))
    ),
    max_leaves=15,
)


@settings(max_examples=1500, deadline=None)
@given(trees)
def test_no_tree_does_more_than_become_a_value_or_be_refused(tree: Any) -> None:
    kept = {0: torch.zeros(8, dtype=torch.uint8), 1: torch.zeros(2, 2), 2: torch.zeros(0, dtype=torch.uint8)}

    def get(handle: Any) -> torch.Tensor:
        if not isinstance(handle, int) or handle not in kept:
            raise WireError("no such tensor")
        return kept[handle]

    with contextlib.suppress(WireError):
        unflatten(tree, get)


@given(st.binary(max_size=200))
def test_no_header_of_random_bytes_is_read(header: bytes) -> None:
    assert outcome(message(None, raw=header)) == "refused"


def test_decoding_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [small(), encode(RequestRecord("r", None, None, (), True)), b"no message"]
    imported: list[str] = []
    for data in messages:
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", lambda name, *_: imported.append(name))
            with contextlib.suppress(WireError):
                decode(data)
    assert imported == []


def test_a_users_class_is_not_looked_for_where_its_value_arrives(tmp_path: Any) -> None:
    @dataclass
    class Secret:
        x: int

    Secret.__module__ = "secret_module"
    (tmp_path / "secret_module.py").write_text("raise SystemExit('imported')")
    (tmp_path / "data").write_bytes(encode([Secret(1), np.float64(1), torch.ones(2)]))
    script = """
        import sys
        sys.path.insert(0, ".")
        from nnsight_lab.wire.codec import decode, encode
        decode(encode([1]))
        before = set(sys.modules)
        value = decode(open("data", "rb").read())
        assert value[0].x == 1
        assert set(sys.modules) == before, set(sys.modules) - before
    """
    root = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert root.returncode == 0, root.stderr

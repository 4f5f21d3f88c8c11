"""Files of saves: whole or not at all, open to everybody's readers, and exact when they are read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnsight_lab as lab
from nnsight_lab.errors import AmbiguousSave, CannotTravel, CellUsageError, FileRefused, SaveNotFound
from nnsight_lab.saves import files
from nnsight_lab.saves.files import find, read, remove, write
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.wire.tensors import DTYPES, NUMPY_DTYPES
from tests.saves.folders import open_files, python, watched
from tests.wire.codec_values import assert_same, bits, texts, values

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
reusing_the_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with watched(tmp_path):
        yield tmp_path


@reusing_the_folder
@given(st.dictionaries(texts, values, max_size=3))
def test_any_values_come_back_exactly(folder: Path, value: dict[str, Any]) -> None:
    write(folder / "x", value)
    got = dict(read(folder / "x").saves())
    assert list(got) == list(value)
    for name in value:
        assert_same(value[name], got[name])


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (3, 4)])
def test_every_dtype_comes_back_to_the_last_bit_and_opens_in_a_plain_reader(
    folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    dtype = DTYPES[name]
    count = int(np.prod(shape)) * dtype.itemsize
    raw = bytes(n % 2 if dtype is torch.bool else (37 * n) % 256 for n in range(count))
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.view(shape)
    write(folder / "x", {"h": tensor})
    (label,) = read(folder / "x").labels
    assert (label.dtype, label.shape, label.bytes) == (name, shape, count)
    assert_same(tensor, read(folder / "x").get("h"))
    plain = safetensors.torch.load_file(folder / "x.safetensors")["h"]
    assert bits(plain) == bits(tensor)
    if dtype.is_complex:
        assert plain.shape == (*shape, 2)
    elif name not in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        assert (plain.dtype, tuple(plain.shape)) == (dtype, shape)


@pytest.mark.parametrize("code", sorted(NUMPY_DTYPES))
def test_arrays_are_arrays_to_plain_numpy_too(folder: Path, code: str) -> None:
    dtype = np.dtype(code)
    array = np.arange(6).astype(dtype).reshape(2, 3)
    write(folder / "x", {"a": array, "view": array[:, ::2]})
    assert_same(array, read(folder / "x").get("a"))
    assert_same(np.ascontiguousarray(array[:, ::2]), read(folder / "x").get("view"))
    plain = safetensors.numpy.load_file(folder / "x.safetensors")["a"]
    assert plain.tobytes() == array.tobytes()
    if dtype.isnative and dtype.kind != "c":
        assert (plain.dtype, plain.shape) == (dtype, array.shape)


def test_a_plain_reader_finds_nested_tensors_by_their_path(folder: Path) -> None:
    value = {"hidden": [{"x": torch.ones(2)}, {"x": torch.zeros(3)}], "loss": 1.5}
    write(folder / "x", value)
    assert safetensors.torch.load_file(folder / "x.safetensors").keys() == {
        "hidden[0]['x']",
        "hidden[1]['x']",
    }
    assert read(folder / "x").get("loss") == 1.5


def test_names_of_a_store_file_say_what_is_not_the_same_for_all(folder: Path) -> None:
    store = SavesStore()
    tensor = torch.ones(1)
    store.put("r1", [{"trace": {"h": tensor}, "probe": {"h": tensor + 1}}])
    write(folder / "one", store)
    assert safetensors.torch.load_file(folder / "one.safetensors").keys() == {"trace/h", "probe/h"}
    store.put("r2", [{"trace": {"h": tensor + 2}}, {"trace": {"h": tensor + 3}}])
    write(folder / "all", store)
    assert safetensors.torch.load_file(folder / "all.safetensors").keys() == {
        *("r1/0/trace/h", "r1/0/probe/h", "r2/0/trace/h", "r2/1/trace/h")
    }


def test_names_that_would_clash_are_told_apart(folder: Path) -> None:
    value = {"a": {"b": torch.ones(1)}, "a['b']": torch.ones(2), "__metadata__": torch.ones(3)}
    write(folder / "x", value)
    assert len(safetensors.torch.load_file(folder / "x.safetensors")) == 3
    got = read(folder / "x").saves()
    assert [got["a"]["b"].shape, got["a['b']"].shape, got["__metadata__"].shape] == [(1,), (2,), (3,)]


def test_one_tensor_under_two_names_is_written_once(folder: Path) -> None:
    tensor = torch.ones(1000)
    path = write(folder / "x", {"a": tensor, "b": [tensor, tensor]})
    assert path.stat().st_size < 1.5 * tensor.nbytes
    got = read(folder / "x").saves()
    assert got["b"][0] is got["b"][1]
    assert torch.equal(got["a"], got["b"][0])


def test_labels_come_back_with_what_was_known_of_the_request(folder: Path) -> None:
    store = SavesStore()
    common: dict[str, Any] = {
        "engine": "main",
        "prompt": "Där är \ud800 das",
        "sampling": {"temperature": 0.0, "stop": ["x"], "seed": None},
        "edits": (("probe", 3, "h = layer.output\n"),),
        "block_source": "x = 1",
        "versions": {"nnsight": "0.8.1"},
    }
    put = store.put(
        "r1", {1: {"probe": {"h": [torch.ones(1)]}}}, common, module_paths={("probe", "h"): "model.layers.3"}
    )
    write(folder / "x", store)
    assert read(folder / "x").labels == put.labels
    (label,) = put.labels
    assert (label.sequence, label.edit_version, label.block_source) == (1, 3, "h = layer.output\n")
    assert (label.module_path, label.step) == ("model.layers.3", 0)


def test_the_label_file_can_be_read_by_people_and_other_programs(folder: Path) -> None:
    write(folder / "x", {"h": [torch.ones(2, dtype=torch.complex64)]}, common={"model": "tiny"})
    document = json.loads((folder / "x.json").read_text())
    (save,) = document["requests"][0]["saves"]
    assert save["leaves"] == [
        {"path": "[0]", "kind": "tensor", "dtype": "complex64", "shape": [2], "tensor": "h[0]"}
    ]


def test_some_saves_of_a_store_are_written_by_their_labels(folder: Path) -> None:
    store = SavesStore()
    big = torch.ones(100_000)
    store.put("r1", [{"trace": {"big": big, "h": [torch.ones(1), torch.ones(2)]}}])
    store.put("r2", [{"trace": {"h": torch.zeros(3)}}])
    path = write(folder / "x", store, labels=store.labels("r1", step=1))
    got = read(path)
    assert (got.requests, [label.path for label in got.labels]) == (("r1",), ["[0]", "[1]"])
    assert path.stat().st_size < 1000
    with pytest.raises(SaveNotFound):
        write(folder / "y", store, labels=[store.labels("r1")[0].key._replace(name="other")])


def test_a_file_is_read_without_loading_it_and_its_slices_without_the_rest(folder: Path) -> None:
    write(folder / "x", {"h": torch.arange(25_000_000).view(25_000, 1000)})
    before = open_files()
    grown = python(
        "import sys, psutil\n"
        "from nnsight_lab.saves.files import read\n"
        "file = read(sys.argv[1])\n"
        "rss = psutil.Process().memory_info().rss\n"
        "whole = file.get('h')\n"
        "rows = file.slice(file.labels[0], [3, 20_000])\n"
        "assert rows[1, 5] == 20_000_005 and whole[24_999, 999] == 24_999_999\n"
        "print(psutil.Process().memory_info().rss - rss)",
        str(folder / "x"),
    )
    assert int(grown) < 30_000_000  # of 200 MB
    tensors = [read(folder / "x").get("h") for _ in range(50)]
    assert open_files() == before, "a mapping keeps a file open"
    del tensors


def test_changing_a_tensor_that_was_read_changes_no_file(folder: Path) -> None:
    write(folder / "x", {"h": torch.zeros(4)})
    file = read(folder / "x")
    tensor = file.get("h")
    tensor[:] = 7
    assert file.get("h").tolist() == [0, 0, 0, 0]


def test_a_mapped_tensor_outlives_its_file(folder: Path) -> None:
    write(folder / "x", {"h": torch.ones(100_000)})
    file = read(folder / "x")
    tensor = file.get("h")
    remove(folder / "x")
    assert list(folder.iterdir()) == []
    assert tensor.sum() == 100_000
    with pytest.raises(FileRefused, match="No such file"):
        file.get("h")


def test_which_save_is_meant_has_to_be_clear(folder: Path) -> None:
    store = SavesStore()
    store.put("r1", [{"trace": {"h": 1}, "probe": {"h": 2}}])
    store.put("r2", [{"trace": {"h": 3}}])
    write(folder / "x", store)
    file = read(folder / "x")
    with pytest.raises(SaveNotFound, match="say which"):
        file.get("h")
    with pytest.raises(AmbiguousSave):
        file.get("h", request_id="r1")
    assert file.get("h", "probe", request_id="r1") == 2
    assert file.get("h", request_id="r2") == 3
    for one in (file, store):
        assert one.get("r1", "h", "probe") == one.get("r1", "h", block="probe") == 2
        assert one.get("r2", "h") == one.get("h", request_id="r2") == 3
        assert one.saves("r2").trace == {"h": 3}
        for unclear in (lambda one=one: one.get("h"), lambda one=one: one.saves()):
            with pytest.raises(SaveNotFound, match="2 requests: say which"):
                unclear()
        for wrong in ((), (3,), ("r1", "h", "probe", "more")):
            with pytest.raises(CellUsageError):
                one.get(*wrong)  # type: ignore[arg-type]
    store.drop("r1")
    assert store.get("h") == store.saves()["h"] == 3


def test_a_path_may_begin_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    store = SavesStore()
    store.put("r1", [{"trace": {"h": 1}}])
    assert store.write("~/deep/x") == folder / "deep" / "x.safetensors"
    assert lab.read("~/deep/x").get("h") == lab.read(Path("~/deep/x.json")).get("h") == 1


@pytest.mark.parametrize("wrong", ["x", 3, None, ("r1", "h"), ["r1", 0, "trace", "h", ""], object()])
def test_what_is_no_label_is_refused_in_one_line(wrong: Any, folder: Path) -> None:
    store = SavesStore()
    store.put("r1", [{"trace": {"h": torch.ones(2)}}])
    write(folder / "x", store)
    file = read(folder / "x")
    asking = [
        store.summary,
        file.summary,
        lambda one: store.slice(one, ...),
        lambda one: file.slice(one, ...),
    ]
    for ask in asking:
        with pytest.raises(CellUsageError, match=r"no label of a save.*labels\(name="):
            ask(wrong)
    key = ("r1", 0, "trace", "h", "")
    assert store.summary(key).max == file.summary(key).max == 1  # type: ignore[arg-type]


def test_what_cannot_travel_leaves_no_file(folder: Path) -> None:
    with pytest.raises(CannotTravel, match=r"h\[1\]"):
        write(folder / "x", {"h": [1, lambda: 0]})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("call", range(5))
def test_a_write_that_fails_leaves_the_old_pair_or_none_that_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    write(folder / "x", {"h": torch.zeros(3)})
    calls = iter(range(10))

    def failing(real: Any) -> Any:
        def fail(*arguments: Any) -> Any:
            if next(calls) == call:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(Path, "rename", failing(Path.rename))
        with pytest.raises(OSError, match="No space"):
            write(folder / "x", {"h": torch.ones(3)})
    names = {path.name for path in folder.iterdir()}
    assert not any("unfinished" in name for name in names)
    if call < 2:  # while the new pair was written
        assert read(folder / "x").get("h").tolist() == [0, 0, 0]
    elif call == 4:  # both were in place, and the directory could not be flushed
        assert read(folder / "x").get("h").tolist() == [1, 1, 1]
    else:
        with pytest.raises(FileRefused):
            read(folder / "x")


def test_labels_never_stand_beside_the_tensors_of_another_write(folder: Path) -> None:
    write(folder / "x", {"h": torch.zeros(3)})
    write(folder / "y", {"h": torch.ones(3)})
    (folder / "y.safetensors").rename(folder / "x.safetensors")
    with pytest.raises(FileRefused, match="not the file that was written"):
        read(folder / "x")


def test_saves_are_found_again_by_a_later_process(folder: Path) -> None:
    python(
        "import sys, torch\n"
        "from nnsight_lab.saves.store import SavesStore\n"
        "from nnsight_lab.saves.files import write\n"
        "store = SavesStore(budget_bytes=1000, spill_dir=sys.argv[1])\n"
        "store.put('r/1', [{'trace': {'h': [torch.ones(500)]}}], {'prompt': 'p'})\n"
        "write(sys.argv[1] + '/by_hand', {'z': torch.ones(2)})\n",
        str(folder),
    )
    (folder / "half.safetensors").write_bytes(b"12345678")
    (folder / "other.json").write_text("{}")
    found = find(folder)
    assert [f.path.name[:5] for f in found if f.file is None] == ["half."]
    read_back = {label.request_id: f.file for f in found if f.file is not None for label in f.file.labels}
    assert read_back.keys() == {"r/1", ""}
    assert read_back["r/1"].get("h")[0].sum() == 500
    assert read_back["r/1"].labels[0].prompt == "p"
    assert find(folder / "nowhere") == []
    store = SavesStore()
    store.adopt(read_back["r/1"])
    assert store.get("r/1", "h")[0].sum() == 500
    store.clear()
    assert read(read_back["r/1"].path).get("h")[0].sum() == 500, (
        "a file that was adopted is not ours to delete"
    )


def test_either_name_or_the_stem_opens_the_pair(folder: Path) -> None:
    write(folder / "run.v1", {"h": 1})
    for name in ("run.v1", "run.v1.safetensors", "run.v1.json"):
        assert read(folder / name)["h"] == 1
    assert files.pair("a.b") == (Path("a.b.safetensors"), Path("a.b.json"))

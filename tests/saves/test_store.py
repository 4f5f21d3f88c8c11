"""The store: many requests within a budget, found by label, read in slices, gone when dropped."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import (
    AmbiguousSave,
    CannotTravel,
    CellUsageError,
    OverBudget,
    SaveNotFound,
    SavesError,
)
from nnsight_lab.saves import files
from nnsight_lab.saves import store as store_module
from nnsight_lab.saves.budget import default_budget_bytes
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.summary import summarize
from tests.saves.folders import open_files, python, watched
from tests.wire.codec_values import arrays, assert_same, bits, tensors

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
KB = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with watched(tmp_path):
        yield tmp_path


def block(**values: Any) -> list[dict[str, dict[str, Any]]]:
    return [{"trace": values}]


def kilobytes(count: int, fill: int = 0) -> torch.Tensor:
    return torch.full((count, KB), fill, dtype=torch.uint8)


def spilled(store: SavesStore) -> set[str]:
    return {request.request_id for request in store if request.on_disk}


def test_what_was_put_is_got_back_by_name_block_and_sequence() -> None:
    store = SavesStore()
    tensor = torch.ones(3)
    store.put(
        "r1", [{"trace": {"h": [tensor, {"loss": 1.5}]}, "probe": {"p": "x"}}, {"trace": {"h": "second"}}]
    )
    got = store.get("r1", "h")
    assert got[0] is tensor
    assert got[1] == {"loss": 1.5}
    assert store.get("r1", "p", block="probe") == "x"
    assert store.get("r1", "h", sequence=1) == "second"
    assert store.saves("r1").edit("probe") == {"p": "x"}


def test_what_is_not_there_is_refused_with_the_nearest_name() -> None:
    store = SavesStore()
    store.put("request-1", [{"trace": {"hidden": 1}, "probe": {"hidden": 2}}])
    with pytest.raises(SaveNotFound, match="request-1"):
        store.get("request-2", "hidden")
    with pytest.raises(SaveNotFound, match="'hidden'"):
        store.get("request-1", "hiden")
    with pytest.raises(AmbiguousSave, match="probe"):
        store.get("request-1", "hidden")
    with pytest.raises(SaveNotFound, match="sequence 3"):
        store.get("request-1", "hidden", sequence=3)
    with pytest.raises(SaveNotFound):
        store.get("request-1", "hidden", block="other")


def test_a_list_that_grows_in_the_notebook_does_not_grow_in_the_store() -> None:
    store = SavesStore()
    steps = [torch.ones(1)]
    store.put("r1", block(steps=steps))
    steps.append(torch.ones(2))
    assert len(store.get("r1", "steps")) == len(store.labels()) == 1
    store.get("r1", "steps").append(0)
    assert len(store.get("r1", "steps")) == 1


def test_labels_are_filtered_without_loading_anything() -> None:
    store = SavesStore()
    for number in range(3):
        store.put(
            f"r{number}",
            [{"trace": {"h": [torch.ones(1)] * 2}, "probe": {"p": torch.ones(1)}}, {"trace": {"h": 1}}],
        )
    assert [label.request_id for label in store.labels(name="p")] == ["r2", "r1", "r0"]
    assert len(store.labels()) == 12
    assert {label.block for label in store.labels("r1")} == {"trace", "probe"}
    assert [label.path for label in store.labels("r1", block="trace", sequence=0)] == ["[0]", "[1]"]
    assert [label.path for label in store.labels("r1", step=1)] == ["[1]"]
    assert store.labels("nobody") == []


def test_iteration_is_newest_first_and_putting_again_replaces() -> None:
    store = SavesStore()
    for name in ("a", "b", "c", "a"):
        store.put(name, block(x=name))
    assert [request.request_id for request in store] == ["a", "c", "b"]
    assert len(store) == 3
    assert "a" in store
    assert "z" not in store


@pytest.mark.parametrize("on_disk", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_slice_of_the_store_is_a_slice_of_the_tensor(
    folder: Path, on_disk: bool, data: st.DataObject
) -> None:
    tensor = data.draw(tensors())
    store = SavesStore(budget_bytes=0, spill_dir=folder) if on_disk else SavesStore()
    store.put("r1", block(x=["text", tensor]))
    assert len(store.get("r1", "x")) == 2
    label = store.labels("r1")[1]
    parts = [
        data.draw(st.integers(-size, size - 1) | st.slices(size).filter(lambda s: (s.step or 1) > 0))
        if size
        else slice(None)
        for size in tensor.shape
    ]
    index: Any = tuple(parts[: data.draw(st.integers(0, len(parts)))])
    if tensor.dim() and tensor.shape[0]:
        index = data.draw(
            st.just(index) | st.lists(st.integers(0, tensor.shape[0] - 1), min_size=1, max_size=3)
        )
    # Its bytes as one more dimension: torch cannot index all of its own dtypes.
    whole = torch.frombuffer(bytearray(bits(tensor) or b"0"), dtype=torch.uint8)[: tensor.nbytes]
    wanted = whole.view(*tensor.shape, tensor.dtype.itemsize)[index]
    got = store.slice(label, index)
    assert got.dtype == tensor.dtype
    assert got.shape == wanted.shape[:-1]
    assert bits(got) == wanted.contiguous().numpy().tobytes()
    store.clear()


@settings(deadline=None)
@given(arrays())
def test_a_slice_of_an_array_is_a_tensor_in_this_machines_byte_order(array: np.ndarray[Any, Any]) -> None:
    store = SavesStore()
    store.put("r1", block(x=array))
    got = store.slice(store.labels()[0], ...)
    native = array.astype(array.dtype.newbyteorder("="))
    assert (got.numpy().dtype, got.shape) == (native.dtype, native.shape)
    assert got.numpy().tobytes() == native.tobytes()


def test_arrays_that_share_memory_under_other_dtypes_stay_what_they_are(folder: Path) -> None:
    array = np.arange(4, dtype="<f4")
    value = {
        "f": array,
        "i": array.view("<i4"),
        "u": torch.from_numpy(array.view("u1")),
        "e": [np.zeros(0), np.zeros((0, 3), "<i2")],
    }
    for store in (SavesStore(), SavesStore(budget_bytes=0, spill_dir=folder)):
        store.put("r1", block(**value))
        for name, one in value.items():
            assert_same(one, store.get("r1", name))
        assert store.slice(store.labels(name="i")[0], 1).dtype == torch.int32
        assert store.slice(store.labels(name="f")[0], 1).item() == 1.0
        assert store.slice(store.labels(name="e")[1], ...).shape == (0, 3)
        store.clear()


def test_a_slice_owns_its_memory_and_takes_a_key_as_well_as_a_label() -> None:
    store = SavesStore()
    tensor = torch.arange(6).view(2, 3)
    store.put("r1", block(x=tensor, n=3))
    label = store.labels(name="x")[0]
    row = store.slice(label.key, 1)
    row[:] = 0
    assert tensor[1].tolist() == [3, 4, 5]
    assert row.untyped_storage().nbytes() == 24
    assert store.slice(("r1", 0, "trace", "x", ""), (0, 1)).item() == 1  # type: ignore[arg-type]
    with pytest.raises(SavesError, match="no tensor but a int"):
        store.slice(store.labels(name="n")[0], 0)
    with pytest.raises(SaveNotFound):
        store.slice(label.key._replace(path="[0]"), 0)


def test_statistics_are_computed_when_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counting(leaf: Any, check: Any) -> Any:
        asked.append(leaf)
        return summarize(leaf, check)

    monkeypatch.setattr(store_module, "summarize", counting)
    store = SavesStore(budget_bytes=10)
    store.put("r1", block(x=torch.tensor([1.0, 3.0])))
    (label,) = store.labels()
    assert asked == []
    assert store.summary(label).mean == store.summary(label.key).mean == 2.0
    store.put("r2", block(x=torch.ones(100)))  # which spills the first
    assert store.summary(label).mean == 2.0
    assert len(asked) == 1
    store.put("r1", block(x=torch.tensor([5.0, 5.0])))
    assert store.summary(label).mean == 5.0


def test_over_budget_the_least_recently_used_request_goes_to_disk_as_a_whole(folder: Path) -> None:
    store = SavesStore(budget_bytes=35 * KB, spill_dir=folder)
    for number in range(3):
        store.put(f"r{number}", block(x=kilobytes(5, number), y=[kilobytes(5, number)], text="t"))
    assert spilled(store) == set()
    store.get("r0", "text")
    store.put("r3", block(x=kilobytes(10, 3)))
    assert spilled(store) == {"r1"}
    assert store.bytes_in_memory == 30 * KB
    assert 10 * KB < store.bytes_on_disk < 15 * KB
    assert store.bytes_on_disk == sum(path.stat().st_size for path in folder.iterdir())
    assert torch.equal(store.get("r1", "y")[0], kilobytes(5, 1))
    assert store.slice(store.labels("r1", name="x")[0], (2, slice(0, 3))).tolist() == [1, 1, 1]
    assert store.get("r1", "text") == "t"


def test_a_store_that_is_asked_to_gives_its_memory_up_but_for_what_is_kept(folder: Path) -> None:
    store = SavesStore(budget_bytes=2**20, spill_dir=folder)
    for name in ("r1", "r2", "r3"):
        store.put(name, block(x=torch.full((100,), float(name[1]))))
    store.keep("r2")
    store.spill()
    assert store.bytes_in_memory == 400
    assert [request.on_disk for request in store] == [True, False, True]
    for name in ("r1", "r2", "r3"):
        assert store.get(name, "x").eq(float(name[1])).all()


def test_a_request_larger_than_the_budget_goes_to_disk_at_once(folder: Path) -> None:
    store = SavesStore(budget_bytes=5 * KB, spill_dir=folder)
    assert store.put("r1", block(x=kilobytes(6))).on_disk
    assert store.bytes_in_memory == 0
    assert torch.equal(store.get("r1", "x"), kilobytes(6))


def test_a_kept_request_is_neither_spilled_nor_dropped_by_age(folder: Path) -> None:
    store = SavesStore(budget_bytes=15 * KB, spill_dir=folder, max_requests=3)
    store.put("first", block(x=kilobytes(10)))
    store.keep("first")
    for number in range(5):
        store.put(f"r{number}", block(x=kilobytes(10)))
    assert [request.request_id for request in store] == ["r4", "r3", "first"]
    assert spilled(store) == {"r3", "r4"}
    assert len(list(folder.iterdir())) == 4, "dropping by age takes the files along"
    store.keep("first", on=False)
    store.put("r5", block(x=kilobytes(1)))
    assert "first" not in store
    with pytest.raises(SaveNotFound):
        store.keep("first")


def test_past_the_cap_the_oldest_is_dropped_so_that_a_long_run_stays_flat() -> None:
    store = SavesStore(max_requests=10)
    for number in range(100):
        store.put(f"r{number}", block(x=torch.ones(10)))
    assert len(store) == 10
    assert store.bytes_in_memory == 10 * 40
    assert [request.request_id for request in store][-1] == "r90"


def test_dropping_takes_memory_and_files_along(folder: Path) -> None:
    store = SavesStore(budget_bytes=10 * KB, spill_dir=folder)
    store.put("r1", block(x=kilobytes(10)))
    store.put("r2", block(x=kilobytes(10)))
    assert spilled(store) == {"r1"}
    store.drop("r1")
    assert list(folder.iterdir()) == []
    assert store.bytes_on_disk == 0
    store.drop("r2")
    assert (len(store), store.bytes_in_memory, store.labels()) == (0, 0, [])
    with pytest.raises(SaveNotFound):
        store.drop("r2")


@pytest.mark.parametrize("on_disk", [False, True])
def test_dropping_by_label_leaves_the_other_saves(folder: Path, on_disk: bool) -> None:
    store = SavesStore(budget_bytes=0 if on_disk else 10**9, spill_dir=folder)
    shared = kilobytes(2)
    store.put("r1", [{"trace": {"a": [kilobytes(5), shared], "b": shared}, "probe": {"c": kilobytes(1)}}])
    store.put("r2", block(d=1))
    gone = store.labels(name="a")
    store.summary(gone[0])
    store.drop(gone[0])
    store.drop(gone)  # a second time is harmless
    assert [(label.block, label.name) for label in store.labels("r1")] == [("trace", "b"), ("probe", "c")]
    assert torch.equal(store.get("r1", "b"), shared)
    with pytest.raises(SaveNotFound):
        store.get("r1", "a")
    with pytest.raises(SaveNotFound):
        store.summary(gone[0])
    assert (store.bytes_on_disk if on_disk else store.bytes_in_memory) < 5 * KB
    found = [label.name for f in files.find(folder) if f.file for label in f.file.labels]
    assert found == (["b", "c"] if on_disk else []), "what was dropped must not be found again"
    store.drop(store.labels("r1"))
    assert "r1" not in store
    assert list(folder.iterdir()) == []


def test_clearing_lets_go_of_everything_and_of_its_own_files_only(folder: Path) -> None:
    store = SavesStore(budget_bytes=0, spill_dir=folder)
    store.put("r1", block(x=kilobytes(1)))
    store.keep("r1")
    store.put("r2", block(x=kilobytes(1)))
    files.write(folder / "mine", {"x": kilobytes(1)})
    store.clear()
    assert (len(store), store.bytes_in_memory, store.bytes_on_disk) == (0, 0, 0)
    assert {path.name for path in folder.iterdir()} == {"mine.safetensors", "mine.json"}


def test_a_store_without_a_directory_spills_to_one_of_its_own_and_takes_it_along() -> None:
    store = SavesStore(budget_bytes=0)
    store.put("r1", block(x=kilobytes(1, 7)))
    tensor = store.get("r1", "x")
    (held,) = store.held()
    path = held.tensors.path  # type: ignore[attr-defined]
    assert path.exists()
    del store, held
    gc.collect()
    assert not path.parent.exists()
    assert tensor[0, 0] == 7


def test_nothing_of_a_dropped_request_is_held_anywhere(folder: Path) -> None:
    store = SavesStore(budget_bytes=10**6, spill_dir=folder)
    for let_go in (lambda: store.drop("r1"), store.clear, lambda: store.put("r2", block(x=kilobytes(1000)))):
        tensor = torch.ones(100, 100)
        inner = np.ones(1000)
        seen = [weakref.ref(tensor), weakref.ref(inner)]
        request = store.put("r1", block(x=tensor, y=[{"z": inner}]))
        labels = store.labels("r1")
        assert store.summary(labels[0]).mean == 1
        store.slice(labels[1], 0)
        repr(store), store._repr_html_()
        del tensor, inner
        gc.collect()
        assert seen[0]() is not None
        let_go()
        gc.collect()
        assert [ref() for ref in seen] == [None, None]
        assert request.labels == tuple(labels), "labels hold no tensor"


def test_the_memory_of_a_dropped_and_of_a_spilled_request_returns(folder: Path) -> None:
    kept, after_spill, after_drop, after_mapped = python(
        "import sys, gc, psutil, torch\n"
        "from nnsight_lab.saves.store import SavesStore\n"
        "rss = lambda: (gc.collect(), psutil.Process().memory_info().rss // 10**6)[1]\n"
        "store = SavesStore(budget_bytes=600_000_000, spill_dir=sys.argv[1])\n"
        "store.put('warm', [{'trace': {'x': torch.ones(10)}}]); store.clear()\n"
        "start = rss()\n"
        "store.put('r1', [{'trace': {'x': torch.ones(500_000, 250)}}])\n"
        "kept = rss() - start\n"
        "store.put('r2', [{'trace': {'x': torch.ones(50_000, 1000)}}])\n"
        "assert [r.on_disk for r in store] == [False, True]\n"
        "spilled = rss() - start\n"
        "store.drop('r2')\n"
        "dropped = rss() - start\n"
        "assert store.slice(store.labels('r1')[0], 400_000).sum() == 250\n"
        "print(kept, spilled, dropped, rss() - start)\n",
        str(folder),
    ).split()
    assert int(kept) > 450
    assert int(after_spill) < 300  # the second one's 200 MB
    assert int(after_drop) < 60
    assert int(after_mapped) < 60


def test_ten_thousand_requests_are_put_in_well_under_two_seconds() -> None:
    rows = torch.randn(10_000, 576).unbind()
    common = {"prompt": "The Eiffel Tower", "sampling": {"temperature": 0.0, "max_tokens": 3}}
    store = SavesStore(max_requests=10_000)
    began = time.process_time()  # what it costs, not what else the machine was doing
    for number, row in enumerate(rows):
        store.put(f"r{number}", block(h=row), common)
    assert time.process_time() - began < 2
    assert len(store) == 10_000
    began = time.process_time()
    assert len(store.labels(name="h")) == 10_000
    assert time.process_time() - began < 0.5


def test_when_the_disk_is_full_the_request_is_refused_naming_its_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SavesStore(budget_bytes=10 * KB, spill_dir=folder)
    store.put("r1", block(x=kilobytes(8)))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OverBudget, match=r"No space left.*logits \(3 kB\), h \(1 kB\)") as caught:
            store.put("r2", block(h=kilobytes(1), logits=kilobytes(3)))
    assert caught.value.values == (("logits", 3 * KB), ("h", 1 * KB))
    assert (caught.value.asked_bytes, caught.value.allowed_bytes) == (4 * KB, 10 * KB)
    assert [request.request_id for request in store] == ["r1"]
    assert torch.equal(store.get("r1", "x"), kilobytes(8))
    assert list(folder.iterdir()) == []
    store.put("r2", block(h=kilobytes(4)))
    assert spilled(store) == {"r1"}


def test_on_a_full_disk_saves_can_still_be_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SavesStore(budget_bytes=0, spill_dir=folder)
    store.put("r1", block(x=kilobytes(8), y=kilobytes(1, 3)))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store.drop(store.labels(name="x"))
    assert [label.name for label in store.labels()] == ["y"]
    assert store.get("r1", "y")[0, 0] == 3
    store.drop("r1")
    assert list(folder.iterdir()) == []


def test_what_cannot_travel_or_is_no_label_field_is_refused_and_nothing_kept() -> None:
    store = SavesStore()
    with pytest.raises(CannotTravel, match="h"):
        store.put("r1", block(h=object()))
    with pytest.raises(TypeError, match="colour"):
        store.put("r1", block(h=1), {"colour": "red"})
    with pytest.raises(CannotTravel, match="common"):
        store.put("r1", block(h=1), {"sampling": {"x": torch.ones(1)}})
    assert len(store) == 0


def test_labels_know_the_edit_that_saved_them() -> None:
    store = SavesStore()
    common = {"edits": (("probe", 2, "source of probe"),), "block_source": "source of trace"}
    store.put(
        "r1", [{"probe": {"p": 1}, "trace": {"t": 1}}], common, module_paths={("trace", "t"): "model.norm"}
    )
    probe, trace = store.labels()
    assert (probe.edit_version, probe.block_source, probe.module_path) == (2, "source of probe", "")
    assert (trace.edit_version, trace.block_source, trace.module_path) == (0, "source of trace", "model.norm")
    assert probe.created == trace.created > 1.7e9


def test_threads_that_put_get_spill_and_drop_at_once_do_not_disturb_each_other(folder: Path) -> None:
    store = SavesStore(budget_bytes=20 * KB, spill_dir=folder)
    failures: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for number in range(25):
                name = f"{me}-{number}"
                store.put(name, block(x=kilobytes(3, me), y=kilobytes(1, me)))
                label = store.labels(name, name="x")[0]
                assert store.slice(label, (0, 0)).item() == me
                assert store.summary(label).max == me
                if number % 3 == 0:
                    store.drop(label)
                    assert store.get(name, "y")[0, 0] == me
                if number % 2:
                    store.drop(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert len(store) == 4 * 13
    assert store.bytes_in_memory <= 20 * KB
    assert store.bytes_on_disk == sum(path.stat().st_size for path in folder.iterdir())
    store.clear()
    assert list(folder.iterdir()) == []


def test_reading_goes_on_while_a_request_is_written_to_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SavesStore(budget_bytes=10 * KB, spill_dir=folder)
    store.put("r1", block(x=kilobytes(8, 5)))
    writing, go_on = threading.Event(), threading.Event()
    real = store._shelf.spill.write

    def slow(held: Any) -> Any:
        writing.set()
        assert go_on.wait(30)
        return real(held)

    monkeypatch.setattr(store._shelf.spill, "write", slow)
    putting = threading.Thread(target=store.put, args=("r2", block(x=kilobytes(8))))
    putting.start()
    assert writing.wait(30)
    assert store.get("r1", "x")[0, 0] == 5
    store.drop("r1")  # while it is written: its file must not stay
    go_on.set()
    putting.join(30)
    assert [request.request_id for request in store] == ["r2"]
    assert list(folder.iterdir()) == []


def test_spilled_requests_hold_no_file_open(folder: Path) -> None:
    store = SavesStore(budget_bytes=0, spill_dir=folder)
    before = open_files()
    for number in range(50):
        store.put(f"r{number}", block(x=kilobytes(1, number)))
    held = [store.get(f"r{number}", "x") for number in range(50)]
    assert open_files() == before
    assert [int(tensor[0, 0]) for tensor in held] == list(range(50))


def test_a_request_id_of_any_text_makes_a_file_name(folder: Path) -> None:
    store = SavesStore(budget_bytes=0, spill_dir=folder)
    for name in ("../../etc/passwd", "", "a" * 500, "été \ud800", ".", "x\0y"):
        store.put(name, block(x=kilobytes(1)))
        assert store.get(name, "x").shape == (1, KB)
    assert len(list(folder.iterdir())) == 12
    assert all(f.file is not None for f in files.find(folder))


def test_the_table_shows_the_newest_twenty_without_colours_of_its_own() -> None:
    store = SavesStore()
    store.put("old", block(x=1))
    for number in range(25):
        store.put(f"r<{number}>", block(h=[torch.ones(576, dtype=torch.bfloat16)] * 96))
    text = store._repr_html_()
    assert text.count("<tr>") == 21
    assert "r&lt;24&gt;" in text
    assert "[576] × 96" in text
    assert "and 6 more requests" in text
    assert "#" not in text.replace("&#", ""), "a colour of its own is unreadable on some theme"
    assert repr(store).startswith("<SavesStore: 26 requests, 28.8 kB in memory")


def test_the_default_budget_heeds_a_containers_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert default_budget_bytes(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert default_budget_bytes(tmp_path) > 10**6
    assert SavesStore().budget_bytes > 10**6


@pytest.mark.parametrize("wrong", ["hello", -1, None, True, "5 parrots"])
def test_a_budget_that_is_none_is_refused_and_a_size_in_words_is_one(wrong: Any) -> None:
    store = SavesStore()
    before = store.budget_bytes
    with pytest.raises(CellUsageError, match="budget_bytes"):
        store.budget_bytes = wrong
    with pytest.raises(CellUsageError, match="max_requests"):
        store.max_requests = wrong
    assert store.budget_bytes == before
    store.budget_bytes = "2MB"  # type: ignore[assignment]
    assert store.budget_bytes == 2_000_000


def test_a_store_that_may_not_write_drops_and_says_so(folder: Path) -> None:
    store = SavesStore(budget_bytes=0, spill_dir=folder)
    store.disk_bytes = 0
    store.put("r1", block(x=torch.ones(4)))
    assert len(store) == 0
    assert list(folder.iterdir()) == []
    assert "more than may go to disk" in repr(store)

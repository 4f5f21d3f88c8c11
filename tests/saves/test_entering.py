"""Requests enter as they came: cheaply, taken apart when asked for, spilled by another thread."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_lab.errors import SaveNotFound
from nnsight_lab.saves import arrival as arrival_module
from nnsight_lab.saves import spill as spill_module
from nnsight_lab.saves.arrival import Arrival, Fields, Inline
from nnsight_lab.saves.spill import sweep_spills
from nnsight_lab.saves.store import SavesStore
from tests.saves.folders import python
from tests.waiting import until

MB = 10**6


def arriving(name: str, mb: int = 0, fields: Callable[[], Fields] | None = None, **values: Any) -> Arrival:
    """A request with ``values``, and a tensor ``x`` of that many megabytes."""
    blocks: dict[int, Mapping[str, Mapping[str, Any]]] = {0: {"trace": values}}
    if mb:
        blocks[0] = {"trace": {**values, "x": torch.zeros(mb * MB, dtype=torch.uint8)}}
    return Arrival(name, mb * MB, lambda: blocks, fields or (lambda: Fields({"prompt": name}, {})))


def at_rest(store: SavesStore) -> SavesStore:
    until(lambda: not store._shelf.janitor.busy, 10, "the store did not come to rest")
    return store


def test_what_entered_is_taken_apart_when_it_is_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, held = arrival_module.hold, []

    def counting(*args: Any) -> Any:
        held.append(args[0])
        return real(*args)

    monkeypatch.setattr(arrival_module, "hold", counting)
    store = SavesStore()
    store.enter([arriving("a", h=torch.ones(2)), arriving("b", h=torch.ones(3))])
    assert len(store) == 2
    assert "a" in store
    assert store.ids() == ["b", "a"]
    repr(store)
    assert held == []
    assert store.labels("a")[0].prompt == "a"
    assert store.get("a", "h").shape == (2,)
    assert held == ["a"]
    assert [label.shape for label in store.labels()] == [(3,), (2,)]
    assert held == ["a", "b"]


def test_ten_thousand_requests_enter_in_well_under_a_second_and_a_long_run_stays_flat() -> None:
    store = SavesStore()
    rows = torch.randn(10_000, 8).unbind()
    began = time.process_time()
    for number, row in enumerate(rows):
        store.enter([arriving(f"r{number}", h=row)])
    assert time.process_time() - began < 1
    assert len(store) == 1_000
    assert store.ids()[0] == "r9999"


def test_a_calls_requests_stay_whole_until_the_next_call_and_kept_ones_for_good() -> None:
    store = SavesStore(max_requests=3)
    store.enter([arriving("first")])
    store.keep("first")
    store.enter([arriving(f"a{number}") for number in range(10)])
    assert len(store) == 11
    store.enter([arriving("b")])
    assert store.ids() == ["b", "a9", "first"]
    store.max_requests = 0
    store.enter([arriving("c"), arriving("d")])
    assert store.ids() == ["d", "c", "first"]


def test_past_the_budget_another_thread_spills_and_memory_is_let_go(tmp_path: Path) -> None:
    store = SavesStore(budget_bytes=5 * MB, spill_dir=tmp_path)
    tensor = torch.ones(4 * MB, dtype=torch.uint8)
    gone = weakref.ref(tensor)
    store.enter([arriving("a", x=tensor)])  # counted when it is taken apart
    assert store.labels("a")[0].bytes == 4 * MB
    del tensor
    store.enter([arriving("b", 3)])
    at_rest(store)
    assert {request.request_id: request.on_disk for request in store} == {"b": False, "a": True}
    gc.collect()
    assert gone() is None
    assert store.bytes_in_memory == 3 * MB
    assert store.get("a", "x").sum() == 4 * MB
    store.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_drops_the_oldest_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = SavesStore(budget_bytes=5 * MB, spill_dir=tmp_path)
    store.enter([arriving("kept", 2)])
    store.keep("kept")
    monkeypatch.setattr(os, "fsync", full)
    store.enter([arriving("a", 2), arriving("b", 2), arriving("c", 2)])
    at_rest(store)
    assert store.ids() == ["c", "kept"]
    assert "dropped 2 requests: disk full" in repr(store)
    assert list(tmp_path.iterdir()) == []


def test_requests_of_earlier_calls_are_dropped_where_files_are_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SavesStore(budget_bytes=4 * MB, spill_dir=tmp_path)
    done = threading.Event()
    monkeypatch.setattr(store._shelf, "tidy", done.wait)
    store.enter([arriving("a", 3), arriving("b", 3)])
    assert store.ids() == ["b", "a"]  # of the newest call, nothing
    store.enter([arriving("c", 3), arriving("d", 3)])
    done.set()
    assert store.ids() == ["d", "c"]
    assert "dropped 2 requests: saved faster than files take them" in repr(store)


def test_what_it_may_take_of_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "_MOST_BYTES", 5 * MB)
    monkeypatch.setattr(spill_module, "_roomy", lambda: tmp_path)
    store = SavesStore(budget_bytes=2 * MB)
    for number in range(6):
        store.enter([arriving(f"r{number}", 2)])
        at_rest(store)
    assert store.bytes_on_disk < 5 * MB
    assert store.ids() == ["r5", "r4", "r3"]
    assert "as many on disk as may be" in repr(store)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"nnsight_lab.saves.{os.getpid()}.")
    del store
    gc.collect()
    assert not folder.exists()


def test_a_request_that_cannot_be_labelled_is_dropped_and_the_others_are_not() -> None:
    nested: list[Any] = [torch.ones(1)]
    nested.append(nested)
    store = SavesStore()
    store.enter([arriving("good", x=1), arriving("bad", x=nested)])
    assert [label.request_id for label in store.labels()] == ["good"]
    with pytest.raises(SaveNotFound):
        store.get("bad", "x")
    assert "dropped 1 request: too many parts to be labelled" in repr(store)


def test_small_values_are_rebuilt_in_containers_of_their_own() -> None:
    tensor, shared = torch.ones(3), [1, 2]
    values = {"t": tensor, "l": [shared, shared, tensor], "n": 5}
    inline = Inline(values)
    shared.append(3)
    rebuilt = inline.value()
    assert rebuilt["t"] is tensor
    assert rebuilt["l"][:2] == [[1, 2], [1, 2]]
    assert rebuilt["l"][0] is rebuilt["l"][1]
    assert rebuilt["l"][2] is tensor
    assert inline.value()["l"] is not rebuilt["l"]
    assert inline.nbytes == 12
    assert Inline({"t": tensor, "s": "text"}).value() == {"t": tensor, "s": "text"}


def test_a_store_that_is_let_go_takes_its_memory_along_at_once() -> None:
    store = SavesStore(budget_bytes=10 * MB)
    tensor = torch.ones(MB)
    gone = weakref.ref(tensor)
    store.enter([arriving("a", x=tensor)])
    store.labels()
    del tensor, store
    assert gone() is None


def test_what_a_killed_process_spilled_is_swept_and_what_others_have_is_not(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from nnsight_lab.saves import spill\n"
        "from nnsight_lab.saves.store import SavesStore\n"
        "spill._roomy = lambda: Path(sys.argv[1])\n"
        "if not os.fork():\n"
        "    store = SavesStore(budget_bytes=0)\n"
        "    store.put('r', [{'trace': {'x': torch.ones(4)}}])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.wait()\n"
    )
    python(code, str(tmp_path))
    (left,) = tmp_path.iterdir()
    mine = tmp_path / f"nnsight_lab.saves.{os.getpid()}.x"
    mine.mkdir()
    (tmp_path / "nnsight_lab.saves.what").mkdir()
    assert sweep_spills(tmp_path) == [left]
    assert mine.exists()
    assert not left.exists()

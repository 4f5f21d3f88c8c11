"""The list of files that were written: found again, bounded, and no reason to fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from nnsight_lab.errors import SaveNotFound, SavesError
from nnsight_lab.saves import files, written
from nnsight_lab.saves.store import SavesStore
from tests.saves.folders import python


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "state" / "nnsight_lab"


def store_of(*ids: str) -> SavesStore:
    store = SavesStore()
    for number, name in enumerate(ids):
        store.put(name, [{"trace": {"x": torch.full((3,), number)}}])
    return store


def test_what_one_process_wrote_another_finds(tmp_path: Path) -> None:
    store = store_of("r1", "r2")
    store.write(tmp_path / "a")
    store.write(tmp_path / "b", ["r2"])
    store.write(tmp_path / "a")  # once in the list, and now the newest
    assert written.listed() == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    out = python(
        "from nnsight_lab.saves import written\n"
        "for path, file, refused in written.found(): print(path.name, *file.requests)"
    )
    assert out.splitlines() == ["a.safetensors r1 r2", "b.safetensors r2"]


def test_files_that_are_gone_are_left_out_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    store = store_of("r1")
    for name in "abc":
        store.write(tmp_path / name)
    files.remove(tmp_path / "a")
    (tmp_path / "b.json").unlink()
    found = {each.path.stem: each for each in written.found()}
    assert set(found) == {"b", "c"}
    assert "cannot be opened" in found["b"].refused
    assert found["c"].file is not None


def test_files_of_this_directory_are_found_whoever_wrote_them(tmp_path: Path) -> None:
    files.write("mine", {"x": torch.ones(2)})
    files.write(tmp_path / "elsewhere", {"x": torch.ones(2)})
    Path("weights.safetensors").write_bytes(b"a model's")
    assert [each.path.name for each in written.found()] == ["mine.safetensors"]
    store_of("r").write("mine")
    assert len(written.found()) == 1


def test_the_list_keeps_the_newest_and_passes_over_what_it_cannot_read(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "MOST", 3)
    state.mkdir(parents=True)
    index = state / written.INDEX
    bad = ['{"path": ', "[]", "null", '{"path": 5, "time": 1}', '{"path": "relative", "time": 1}', "\xff"]
    index.write_text("\n".join(bad), "latin-1")
    store = store_of("r")
    for number in range(5):
        store.write(tmp_path / f"f{number}")
    assert [path.stem for path in written.listed()] == ["f4", "f3", "f2"]
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    assert [Path(line["path"]).stem for line in lines] == ["f2", "f3", "f4"]
    assert sorted(path.name for path in state.iterdir()) == [f".{written.INDEX}.lock", written.INDEX]


def test_a_home_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert store_of("r").write(tmp_path / "a").exists()
    assert written.listed() == []
    assert written.found() == []


def test_nothing_is_written_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SaveNotFound, match="nothing to write"):
        SavesStore().write(tmp_path / "a")
    with pytest.raises(SaveNotFound, match="'r2'"):
        store_of("r1").write(tmp_path / "a", ["r1", "r2"])
    assert not os.path.exists(tmp_path / "a.safetensors")


def test_writing_over_a_file_that_was_taken_in_keeps_what_is_in_it(tmp_path: Path) -> None:
    path = store_of("r1", "r2").write(tmp_path / "a")
    store = store_of("r3")
    store.adopt(files.read(path))
    store.write(path)
    assert store.get("r1", "x").equal(torch.zeros(3, dtype=torch.int64))
    assert set(files.read(path).requests) == {"r1", "r2", "r3"}


def test_what_a_file_brings_does_not_replace_what_is_here(tmp_path: Path) -> None:
    store = store_of("r1", "r2")
    store.keep("r1")
    path = store.write(tmp_path / "a")
    found = store.adopt(files.read(path))
    assert [(request.request_id, request.on_disk, request.kept) for request in found] == [
        ("r1", False, True),
        ("r2", False, False),
    ]
    path.unlink()
    assert store.get("r1", "x").eq(0).all()
    other = SavesStore()
    assert [request.on_disk for request in other.adopt(files.read(store.write(tmp_path / "b")))] == [
        True,
        True,
    ]


def test_a_file_is_not_replaced_by_less_than_this_store_reads_from_it(tmp_path: Path) -> None:
    path = store_of("r1", "r2", "r3").write(tmp_path / "a")
    store = SavesStore()
    store.adopt(files.read(path))
    with pytest.raises(SavesError, match=r"a\.safetensors holds other saves .*\(2 requests\).*another file"):
        store.write(path, ["r1"])
    assert store.get("r3", "x").eq(2).all()
    store.write(path)
    store.write(tmp_path / "b", ["r1"])
    assert [store.get(name, "x")[0].item() for name in ("r1", "r2", "r3")] == [0, 1, 2]


def test_own_files_stand_first_then_those_near_then_what_others_wrote_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, far = tmp_path / "here", tmp_path / "far"
    store = SavesStore()
    store.put("r", [{"trace": {"x": torch.zeros(2)}}])
    mine, near, others = far / "mine", here / "near", far / "others"
    for path in (mine, near, others):
        store.write(path)
    monkeypatch.setattr(written, "_own", {mine.with_suffix(".safetensors")})
    assert [found.path.stem for found in written.found(most=3)] == ["mine", "near", "others"]
    assert [found.path.stem for found in written.found(most=1)] == ["mine"]

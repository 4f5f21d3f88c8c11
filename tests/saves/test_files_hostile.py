"""A file may come from anyone: it is read, or refused with a reason, and nothing else happens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import FileRefused
from nnsight_lab.saves import files, mapped
from nnsight_lab.saves.files import read, write
from tests.saves.folders import python, watched

reusing_the_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with watched(tmp_path):
        write(tmp_path / "x", {"h": [torch.ones(4), torch.ones(2, 3, dtype=torch.bfloat16)], "n": 1})
        yield tmp_path


def reseal(folder: Path, header: bytes | dict[str, Any], data: bytes | None = None) -> None:
    """Replace the header, and make the label file vouch for it: what somebody with malice can do."""
    path, labels = folder / "x.safetensors", folder / "x.json"
    whole = path.read_bytes()
    old = 8 + int.from_bytes(whole[:8], "little")
    if isinstance(header, dict):
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)  # else it is refused for where its data starts
        header = len(text).to_bytes(8, "little") + text
    whole = header + (whole[old:] if data is None else data)
    path.write_bytes(whole)
    document = json.loads(labels.read_text())
    length = int.from_bytes(whole[:8], "little")
    document["safetensors"] = {
        "bytes": len(whole),
        "header_sha256": hashlib.sha256(whole[: 8 + length]).hexdigest(),
    }
    labels.write_text(json.dumps(document))


def header_of(folder: Path) -> dict[str, Any]:
    whole = (folder / "x.safetensors").read_bytes()
    found: dict[str, Any] = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    return found


def relabel(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "x.json").read_text())
    change(document)
    (folder / "x.json").write_text(json.dumps(document))


@reusing_the_folder
@given(data=st.data())
def test_a_file_cut_off_anywhere_is_refused(folder: Path, data: st.DataObject) -> None:
    for name in ("x.safetensors", "x.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(FileRefused, match=str(folder / name)):
            read(folder / "x")
        (folder / name).write_bytes(whole)


@reusing_the_folder
@given(data=st.data())
def test_any_damage_to_labels_or_header_ends_in_a_file_that_reads_or_is_refused(
    folder: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["x.json", "x.safetensors"]))
    whole = (folder / name).read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(damaged)
    try:
        file = read(folder / "x")
        for label in file.labels:
            if label.kind == "tensor":
                file.slice(label, ...)
    except FileRefused:
        pass
    finally:
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 10_000, 0])
def test_a_header_length_that_cannot_be_is_refused(folder: Path, length: int) -> None:
    reseal(folder, length.to_bytes(8, "little") + b"{}")
    with pytest.raises(FileRefused):
        read(folder / "x")


def _set(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["h[0]"].__setitem__(name, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("data_offsets", [0, 2**62]),
        _set("data_offsets", [-16, 0]),
        _set("data_offsets", [0.0, 16.0]),
        _set("data_offsets", [16, 0]),
        _set("data_offsets", [12, 28]),
        _set("data_offsets", [1, 17]),
        _set("shape", [2**40, 2**40]),
        _set("shape", [-4]),
        _set("shape", "4"),
        _set("dtype", "F64"),
        _set("dtype", "F128"),
        _set("more", 1),
        lambda header: header.pop("h[0]"),
        lambda header: header.update(other={"dtype": "U8", "shape": [0], "data_offsets": [28, 28]}),
        lambda header: header.update({"h[0]": []}),
    ],
)
def test_a_header_that_lies_is_refused_even_where_the_label_file_vouches_for_it(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    header = header_of(folder)
    change(header)
    reseal(folder, header)
    with pytest.raises(FileRefused, match=r"x\.safetensors"):
        read(folder / "x")


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"h[0]": {}, "h[0]": {}}',
    ],
)
def test_a_header_that_is_no_header_is_refused(folder: Path, text: bytes) -> None:
    reseal(folder, len(text).to_bytes(8, "little") + text)
    with pytest.raises(FileRefused):
        read(folder / "x")


def test_tensors_that_overlap_or_leave_gaps_are_refused(folder: Path) -> None:
    header = header_of(folder)
    header["h[0]"]["data_offsets"], header["h[1]"]["data_offsets"] = [0, 16], [8, 20]
    reseal(folder, header)
    with pytest.raises(FileRefused, match="where one belongs"):
        read(folder / "x")


def _first(document: dict[str, Any]) -> Any:
    return document["requests"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format="other"),
        lambda d: d.update(version=2),
        lambda d: d.update(requests={}),
        lambda d: d["requests"].append(7),
        lambda d: d["requests"].append(_first(d)),
        lambda d: d.update(safetensors=None),
        lambda d: _first(d)["tensors"][0].__setitem__(2, "float64"),
        lambda d: _first(d)["tensors"][0].__setitem__(2, "object"),
        lambda d: _first(d)["tensors"][0].__setitem__(2, ""),
        lambda d: _first(d)["tensors"][0].__setitem__(3, [2**60, 2**60]),
        lambda d: _first(d)["tensors"][0].__setitem__(3, [[4]]),
        lambda d: _first(d)["tensors"][0].__setitem__(0, 1),
        lambda d: _first(d)["tensors"].append(_first(d)["tensors"][0]),
        lambda d: _first(d)["tensors"].pop(),
        lambda d: _first(d).update(request_id=None),
        lambda d: _first(d).update(common={"d": {"engine": 7}}),
        lambda d: _first(d).update(common={"d": {"unheard": 7}}),
        lambda d: _first(d).update(common={"d": {"prompt": {"T": 0}}}),
        lambda d: _first(d).update(common={"d": {"edits": {"t": [1]}}}),
        lambda d: _first(d)["saves"].append(_first(d)["saves"][0]),
        lambda d: _first(d)["saves"][0].update(sequence="0"),
        lambda d: _first(d)["saves"][0].update(tree={"T": 99}),
        lambda d: _first(d)["saves"][0].update(tree={"T": {"at": 0}}),
        lambda d: _first(d)["saves"][0].update(tree={"N": [0, "<f4", [4]]}),
        lambda d: _first(d)["saves"][0].update(tree={"@": 0}),
        lambda d: _first(d)["saves"][0].update(tree={"C": ["Popen", {}]}),
        lambda d: _first(d)["saves"][0].update(tree={}),
    ],
)
def test_a_label_file_that_lies_is_refused(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    relabel(folder, change)
    with pytest.raises(FileRefused, match=str(folder)):
        read(folder / "x")


def test_a_label_file_nested_without_end_is_refused(folder: Path) -> None:
    text = (folder / "x.json").read_text()
    (folder / "x.json").write_text("[" * 1_000_000)
    with pytest.raises(FileRefused):
        read(folder / "x")
    (folder / "x.json").write_text(text)
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    relabel(folder, lambda d: _first(d)["saves"][0].update(tree=deep))
    with pytest.raises(FileRefused):
        read(folder / "x")


def test_a_label_file_that_folds_up_a_walk_without_end_is_refused(folder: Path) -> None:
    # Each list holds the one before it twice: a thousand bytes of text, 2**60 tensors.
    nodes: list[Any] = [[{"T": 0}]]
    nodes += [[{"@": number}, {"@": number}] for number in range(1, 61)]
    relabel(folder, lambda d: _first(d)["saves"][0].update(tree=nodes))
    with pytest.raises(FileRefused, match="more than"):
        read(folder / "x")


@pytest.mark.parametrize("name", ["x.json", "x.safetensors"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FileRefused, match="no regular file"):
        read(folder / "x")
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(FileRefused):
        read(folder / "x")
    (folder / name).rmdir()
    with pytest.raises(FileRefused, match="No such file"):
        read(folder / "x")


def test_a_file_that_claims_much_is_refused_before_anything_is_allocated(folder: Path) -> None:
    for name in ("x.json", "x.safetensors"):
        os.truncate(folder / name, 2**36)  # sparse: 64 GiB that take no disk
    grown = python(
        "import resource, sys\n"
        "from nnsight_lab.errors import FileRefused\n"
        "from nnsight_lab.saves.files import read\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    read(sys.argv[1])\n"
        "except FileRefused as refusal:\n"
        "    assert 'is the most' in str(refusal)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n",
        str(folder / "x"),
    )
    assert int(grown) < 10_000


def test_a_file_larger_than_memory_can_still_be_mapped(folder: Path) -> None:
    size = 2**40
    with open(folder / "x.safetensors", "rb+") as file:
        header = {"h": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)

    def vouch(document: dict[str, Any]) -> None:
        seal = hashlib.sha256(len(text).to_bytes(8, "little") + text).hexdigest()
        document["safetensors"] = {"bytes": 8 + len(text) + size, "header_sha256": seal}
        _first(document).update(tensors=[[0, "h", "uint8", [size]]])
        _first(document)["saves"] = [
            {"sequence": 0, "block": "trace", "name": "h", "module_path": "", "tree": {"T": 0}}
        ]

    relabel(folder, vouch)
    file = read(folder / "x")
    assert file.slice(file.labels[0], slice(size - 2, None)).tolist() == [0, 0]


def test_a_file_that_changed_since_it_was_opened_is_refused(folder: Path) -> None:
    file = read(folder / "x")
    write(folder / "x", {"h": [torch.zeros(4), torch.zeros(2, 3, dtype=torch.bfloat16)], "n": 1})
    with pytest.raises(FileRefused, match="not the file"):
        file.get("h")


@pytest.mark.parametrize("place", [0, 17, -1])
def test_a_flipped_bit_of_the_data_is_noticed(folder: Path, place: int) -> None:
    path = write(folder / "x", {"a": torch.arange(40, dtype=torch.float32), "b": torch.ones(3)})
    read(path).verify()
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + place if place >= 0 else place] ^= 4
    path.write_bytes(data)
    with pytest.raises(FileRefused, match="damaged"):
        read(path)


def test_of_a_large_file_damage_is_noticed_when_that_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECKED_BYTES", 100)
    path = write(folder / "x", {"a": torch.arange(40, dtype=torch.float32)})
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    found = read(path)
    with pytest.raises(FileRefused, match="damaged"):
        found.verify()


def test_a_sound_file_is_read_whole_once_and_again_when_it_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = mapped.check_data

    def counted(descriptor: int, size: int, seal: mapped.Seal) -> None:
        checked.append(size)
        check(descriptor, size, seal)

    monkeypatch.setattr(mapped, "check_data", counted)
    path = write(folder / "x", {"a": torch.arange(40, dtype=torch.float32)})
    for _ in range(3):
        assert files.find(folder)[0].refused == ""
    assert len(checked) == 1
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    for _ in range(2):
        assert "damaged" in files.find(folder)[0].refused
    assert len(checked) == 3, "what is not sound is looked at each time"

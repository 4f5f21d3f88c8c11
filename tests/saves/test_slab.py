import errno
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nnsight_lab.saves import slab_files
from nnsight_lab.saves.slab import MIN_SLAB, NoRoom, Place, SlabPool, SlabReader, aligned
from nnsight_lab.saves.slab_files import sweep
from nnsight_lab.wire.extent import Extent, Packed
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.packed import Layout, unpack
from nnsight_lab.wire.tensors import DTYPES

SHM = Path("/dev/shm")
MIB = 2**20


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test{os.getpid()}"
    yield name
    assert not list(SHM.glob(f"nnsight_lab.{name}.*"))


def pool(name: str, tmp_path: Path, memory: int, disk: int = 0, **more: int) -> SlabPool:
    return SlabPool(name, 0, [Place(SHM, memory), Place(tmp_path, disk)], **more)


def put(slabs: SlabPool, value: object) -> Packed:
    layout = Layout.of(value, name="saves")
    extent = slabs.allocate(layout.nbytes)
    layout.copy_into(slabs.view(extent))
    return layout.packed(extent)


def test_values_come_through_shared_memory_as_they_were(name: str, tmp_path: Path) -> None:
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(lambda extent: None)
    shared = torch.randn(3, 4).to(torch.bfloat16)
    value = {
        "a": shared,
        "again": shared,
        "list": [torch.tensor(1.5), torch.empty(0, 7), torch.arange(6).view(2, 3).T],
        "text": "x",
        "none": None,
    }
    found = unpack(put(slabs, value), reader.open)
    assert found["a"].equal(shared)
    assert found["a"].dtype is torch.bfloat16
    assert found["again"] is found["a"]
    assert found["list"][0].shape == ()
    assert found["list"][1].shape == (0, 7)
    assert found["list"][2].equal(value["list"][2])  # type: ignore[index]
    assert (found["text"], found["none"]) == ("x", None)
    slabs.close()


def test_the_reader_sees_the_writers_memory_and_nothing_was_copied(name: str, tmp_path: Path) -> None:
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(lambda extent: None)
    packed = put(slabs, {"x": torch.zeros(4)})
    found = unpack(packed, reader.open)
    slabs.view(packed.extent).view(torch.float32)[0] = 7
    assert found["x"][0] == 7
    slabs.close()


def test_a_piece_is_let_go_with_its_last_tensor_and_not_before(name: str, tmp_path: Path) -> None:
    gone: list[Extent] = []
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(gone.append)
    packed = put(slabs, {"x": torch.zeros(4), "y": [torch.ones(2)]})
    found = unpack(packed, reader.open)
    row = found["y"][0][1:]
    del found
    gc.collect()
    assert gone == []
    del row
    gc.collect()
    assert gone == [packed.extent]
    slabs.close()


def test_returned_pieces_are_used_again_and_neighbours_merge(name: str, tmp_path: Path) -> None:
    slabs = pool(name, tmp_path, 64 * MIB)
    pieces = [slabs.allocate(MIB) for _ in range(8)]
    assert len({piece.path for piece in pieces}) == 1
    slabs.release(pieces[2:4] + pieces[5:6])
    assert slabs.allocate(2 * MIB).offset == pieces[2].offset
    slabs.release([pieces[0], pieces[1]])
    assert slabs.allocate(2 * MIB).offset == 0
    assert slabs.total_bytes == MIN_SLAB
    slabs.close()


def test_past_the_memory_budget_slabs_go_on_disk_and_past_that_they_are_refused(
    name: str, tmp_path: Path
) -> None:
    slabs = pool(name, tmp_path, 4 * MIB, 8 * MIB)
    first = slabs.allocate(3 * MIB)
    assert Path(first.path).parent == SHM
    second = slabs.allocate(7 * MIB)
    assert Path(second.path).parent == tmp_path
    with pytest.raises(NoRoom) as refused:
        slabs.allocate(9 * MIB)
    assert refused.value.asked_bytes == 9 * MIB
    slabs.close()
    assert not list(tmp_path.iterdir())


def test_a_budget_of_nothing_refuses_everything(name: str, tmp_path: Path) -> None:
    with pytest.raises(NoRoom):
        pool(name, tmp_path, 0, 0).allocate(1)


def test_idle_memory_beyond_what_is_kept_warm_returns_to_the_system(name: str, tmp_path: Path) -> None:
    slabs = pool(name, tmp_path, 512 * MIB, warm_bytes=MIN_SLAB)
    large, small = slabs.allocate(200 * MIB), slabs.allocate(MIB)
    assert slabs.total_bytes == aligned(200 * MIB) + MIN_SLAB
    assert slabs.release([large]) == [large.path]
    assert slabs.total_bytes == MIN_SLAB
    assert slabs.release([small]) == []
    slabs.close()


def test_a_mapped_slab_has_no_name_so_nothing_is_left_when_both_ends_die(name: str, tmp_path: Path) -> None:
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(lambda extent: None)
    packed = put(slabs, {"x": torch.zeros(4)})
    assert Path(packed.extent.path).exists()
    kept = unpack(packed, reader.open)
    assert not Path(packed.extent.path).exists()
    assert kept["x"].sum() == 0
    slabs.close()


def test_slabs_of_a_dead_worker_are_swept_and_those_of_a_living_one_are_not(
    name: str, tmp_path: Path
) -> None:
    slabs = pool(name, tmp_path, 64 * MIB)
    alive = Path(slabs.allocate(1).path)
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    orphan = tmp_path / f"nnsight_lab.{name}.{dead.stdout.strip()}.0.0"
    orphan.write_bytes(b"x")
    assert orphan in sweep([tmp_path, SHM])
    assert alive.exists()
    slabs.close()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ((0, "float32", (10**12,)), "does not lie in"),
        ((-64, "float32", (1,)), "cannot be"),
        ((0, "object", (1,)), "cannot be"),
        ((0, "float32", (-1,)), "sizes of zero or more"),
        ((0, "float32", (True,)), "sizes of zero or more"),
        (("0", "float32", (1,)), "cannot be"),
        ((0, ["float32"], (1,)), "cannot be"),
        ((0, "float32"), "describes a tensor"),
        ((10**15, "float32", (1,)), "does not lie in"),
    ],
)
def test_a_message_that_points_outside_its_piece_is_refused(
    name: str, tmp_path: Path, spec: object, said: str
) -> None:
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(lambda extent: None)
    packed = put(slabs, {"x": torch.zeros(4)})
    with pytest.raises(WireError, match=said):
        unpack(Packed(packed.tree, packed.extent, json.dumps([spec])), reader.open)
    slabs.close()


@pytest.mark.parametrize("tensors", ["[", "{}", "1", "[" * 100_000])
def test_a_message_whose_tensors_are_no_list_is_refused(name: str, tmp_path: Path, tensors: str) -> None:
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(lambda extent: None)
    packed = put(slabs, {"x": torch.zeros(4)})
    with pytest.raises(WireError, match=r"JSON|no list"):
        unpack(Packed(packed.tree, packed.extent, tensors), reader.open)
    slabs.close()


def test_memory_to_be_pinned_is_all_there_before_it_is(name: str, tmp_path: Path) -> None:
    pinned: list[tuple[int, int]] = []

    def pin(memory: torch.Tensor) -> None:
        (path,) = SHM.glob(f"nnsight_lab.{name}.*")
        pinned.append((memory.numel(), path.stat().st_blocks * 512))

    slabs = SlabPool(name, 0, [Place(SHM, 64 * MIB)], pin=pin)
    packed = put(slabs, {"x": torch.arange(9)})
    assert [size for size, _ in pinned] == [size for _, size in pinned] == [packed.extent.slab_bytes]
    assert torch.equal(unpack(packed, SlabReader(lambda extent: None).open)["x"], torch.arange(9))
    slabs.close()


@pytest.mark.parametrize("known", [True, False])
def test_memory_that_cannot_be_faulted_in_is_looked_for_on_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def full(*args: object) -> bool:
        if known:
            raise OSError(errno.ENOSPC, "full")
        return False  # an old Linux: the pages are reserved the other way, which finds it full too

    monkeypatch.setattr(slab_files, "_touch", full)
    reserve = os.posix_fallocate

    def reserved(descriptor: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(SHM)):
            raise OSError(errno.ENOSPC, "full")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserved)
    pinned: list[torch.Tensor] = []
    places = [Place(SHM, 64 * MIB), Place(tmp_path, 64 * MIB)]
    slabs = SlabPool(name, 0, places, pin=pinned.append)
    assert Path(slabs.allocate(1).path).parent == tmp_path
    assert pinned == []
    assert list(SHM.glob(f"nnsight_lab.{name}.*")) == []
    slabs.close()


def test_a_piece_of_a_file_that_is_no_slab_is_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0" * 128)
    with pytest.raises(ValueError, match="not a slab"):
        SlabReader(lambda extent: None).open(Extent(str(secret), 128, 0, 64, 0))
    assert secret.exists()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_a_view_of_any_dtype_lies_in_shared_memory_as_its_own_elements(
    name: str, tmp_path: Path, dtype: torch.dtype
) -> None:
    slabs, reader = pool(name, tmp_path, 64 * MIB), SlabReader(lambda extent: None)
    raw = torch.randint(0, 2, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    base = raw.view(dtype)
    views = {"as is": base, "turned": base.T, "strided": base[:, ::3], "wide": base[:1].expand(5, 4)}
    found = unpack(put(slabs, views), reader.open)
    for view in views:
        expected, got = views[view], found[view]
        assert got.shape == expected.shape
        assert got.dtype is dtype
        rows = torch.arange(24 * dtype.itemsize).view(6, 4, dtype.itemsize)
        bytes_of = {
            "as is": rows,
            "turned": rows.transpose(0, 1),
            "strided": rows[:, ::3],
            "wide": rows[:1].expand(5, 4, -1),
        }
        assert got.view(torch.uint8).flatten().equal(raw.flatten()[bytes_of[view].flatten()])
    slabs.close()


def test_pieces_of_two_who_map_them_are_never_in_one_slab(name: str, tmp_path: Path) -> None:
    slabs = pool(name, tmp_path, 4 * MIN_SLAB)
    first, second, common = (slabs.allocate(MIB, share) for share in ("alice", "bob", ""))
    assert len({first.path, second.path, common.path}) == 3
    assert slabs.allocate(MIB, "alice").path == first.path
    slabs.release([first])
    # Nor one after the other, for whoever mapped it may look at it still.
    assert slabs.allocate(MIB, "bob").path == second.path
    slabs.close()


def test_a_retired_slab_is_never_written_again_and_goes_with_its_last_piece(
    name: str, tmp_path: Path
) -> None:
    slabs = pool(name, tmp_path, 4 * MIN_SLAB)
    first, second = slabs.allocate(MIB, "alice"), slabs.allocate(MIB, "alice")
    slabs.release([first])
    slabs.retire([first.path, "not there"])
    assert slabs.allocate(MIB, "alice").path != first.path
    assert slabs.view(second).numel() == MIB  # what is on its way in still comes
    assert slabs.given_up() == []
    assert slabs.release([second]) == [first.path]
    assert slabs.release([first, second]) == []
    slabs.close()

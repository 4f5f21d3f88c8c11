"""A pool that finds no room, gives room back, and is used for long."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_lab.engine import homecoming
from nnsight_lab.engine.homecoming import Homecoming
from nnsight_lab.saves import slab, slab_files
from nnsight_lab.saves.slab import MIN_SLAB, NoRoom, Place, SlabPool, SlabReader
from nnsight_lab.wire.codec import decode
from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.packed import Layout
from tests.waiting import until

MIB = 2**20


def pool(memory: Path, disk: Path, memory_bytes: int, disk_bytes: int = 0, **more: Any) -> SlabPool:
    return SlabPool("room", 0, [Place(memory, memory_bytes), Place(disk, disk_bytes)], **more)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "disk"
    assert not list(tmp_path.glob("*/nnsight_lab.*"))


def full(folder: Path, code: int, patch: pytest.MonkeyPatch) -> None:
    """Make the system refuse every reservation in ``folder``."""
    reserve = os.posix_fallocate

    def refusing(descriptor: int, offset: int, size: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == folder:
            raise OSError(code, os.strerror(code))
        reserve(descriptor, offset, size)

    patch.setattr(os, "posix_fallocate", refusing)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG, errno.EIO])
def test_where_memory_is_full_slabs_go_on_disk_and_leave_no_file_behind(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    full(memory, code, monkeypatch)
    slabs = pool(memory, disk, 256 * MIB, 256 * MIB)
    assert Path(slabs.allocate(MIB).path).parent == disk
    assert list(memory.iterdir()) == []
    slabs.close()


def test_where_everything_is_full_what_was_asked_is_refused_and_later_room_is_found_again(
    memory: Path, disk: Path
) -> None:
    slabs = pool(memory, disk, 256 * MIB, 256 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        full(memory, errno.ENOSPC, patch)
        full(disk, errno.ENOSPC, patch)
        with pytest.raises(NoRoom) as refused:
            slabs.allocate(MIB)
    assert refused.value.allowed_bytes < refused.value.asked_bytes
    assert (slabs.used_bytes, slabs.total_bytes) == (0, 0)
    assert Path(slabs.allocate(MIB).path).parent == memory
    slabs.close()


@pytest.mark.parametrize("kind", ["missing", "a file", "no permission"])
def test_a_folder_that_cannot_be_used_is_passed_over(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bad = tmp_path / "bad"
    if kind == "a file":
        bad.write_bytes(b"")
    elif kind == "missing":
        bad = Path("/proc/nowhere/at/all")
    else:
        make = os.open

        def refused(path: Any, *args: Any, **more: Any) -> int:
            if Path(path).parent == bad:
                raise PermissionError(errno.EACCES, "Permission denied")
            return make(path, *args, **more)

        monkeypatch.setattr(os, "open", refused)
    slabs = pool(bad, disk, 256 * MIB, 256 * MIB)
    assert Path(slabs.allocate(MIB).path).parent == disk
    slabs.close()


def test_memory_that_cannot_be_pinned_is_passed_over(memory: Path, disk: Path) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("cudaHostRegister failed")

    slabs = pool(memory, disk, 256 * MIB, 256 * MIB, pin=refuse, unpin=lambda tensor: None)
    assert Path(slabs.allocate(MIB).path).parent == disk
    slabs.close()


def test_the_last_of_a_file_system_is_left_to_others(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.mkdir()
    total = 1024 * MIB

    class Small:
        f_blocks, f_frsize = total // 4096, 4096
        f_bavail = (256 * MIB + 3 * MIB) // 4096

    ask = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda folder: Small() if folder == memory else ask(folder))
    assert slab_files.free_bytes(memory) == 3 * MIB
    slabs = pool(memory, disk, 256 * MIB, 256 * MIB)
    assert Path(slabs.allocate(4 * MIB).path).parent == disk
    assert Path(slabs.allocate(2 * MIB).path).parent == memory
    slabs.close()


def test_idle_slabs_make_way_for_one_that_none_of_them_can_hold(memory: Path, disk: Path) -> None:
    slabs = pool(memory, disk, 2 * MIN_SLAB)
    pieces = [slabs.allocate(MIN_SLAB), slabs.allocate(MIN_SLAB)]
    assert slabs.release(pieces) == []
    large = slabs.allocate(MIN_SLAB + MIN_SLAB // 2)
    assert Path(large.path).parent == memory
    assert set(slabs.given_up()) == {piece.path for piece in pieces}
    assert slabs.given_up() == []
    with pytest.raises(NoRoom):
        slabs.allocate(MIN_SLAB)
    slabs.close()


def test_memory_that_is_idle_again_is_used_before_disk(memory: Path, disk: Path) -> None:
    slabs = pool(memory, disk, MIN_SLAB, 2 * MIN_SLAB)
    first = slabs.allocate(MIN_SLAB)
    second = slabs.allocate(MIB)
    assert Path(second.path).parent == disk
    slabs.release([first])
    assert Path(slabs.allocate(MIB).path).parent == memory
    slabs.close()


def test_idle_memory_beyond_what_is_kept_goes_after_a_while_and_not_at_once(memory: Path, disk: Path) -> None:
    slabs = pool(memory, disk, 5 * MIN_SLAB, warm_bytes=5 * MIN_SLAB, keep_bytes=MIN_SLAB, idle_s=0.3)
    for _ in range(3):  # calls that come soon find everything as it was
        pieces = [slabs.allocate(MIN_SLAB) for _ in range(5)]
        assert slabs.release(pieces) == []
    assert slabs.made == 5
    until(lambda: slabs.release([]), 5)
    until(lambda: slabs.release([]) or slabs.total_bytes == MIN_SLAB, 5)
    assert slabs.total_bytes == MIN_SLAB
    assert len(slabs.given_up()) == 4
    assert slabs.figures()["count"] == 1
    slabs.close()


def test_a_small_piece_joins_others_so_that_idle_slabs_stay_whole(memory: Path, disk: Path) -> None:
    slabs = pool(memory, disk, 4 * MIN_SLAB)
    pieces = [slabs.allocate(MIN_SLAB), slabs.allocate(2 * MIB)]
    slabs.release(pieces[:1])
    assert slabs.allocate(MIB // 2).path == pieces[1].path
    slabs.close()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 40 * MIB)),
            st.tuples(st.just("give"), st.integers(0, 10**6)),
            st.tuples(st.just("give all"), st.just(0)),
        ),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_taken_and_given_no_two_pieces_overlap_and_all_comes_back(
    memory: Path, disk: Path, steps: list[tuple[str, int]]
) -> None:
    budget = 3 * MIN_SLAB
    slabs = pool(memory, disk, budget, MIN_SLAB, warm_bytes=budget)
    living: list[Extent] = []
    for step, number in steps:
        if step == "take":
            try:
                piece = slabs.allocate(number)
            except NoRoom:
                continue
            assert piece.nbytes >= number
            for other in living:
                apart = (
                    piece.offset + piece.nbytes <= other.offset or other.offset + other.nbytes <= piece.offset
                )
                assert piece.path != other.path or apart
            assert piece.offset + piece.nbytes <= piece.slab_bytes
            living.append(piece)
        elif step == "give" and living:
            slabs.release([living.pop(number % len(living))])
        elif step == "give all":
            slabs.release(living)
            living = []
        assert slabs.used_bytes == sum(piece.nbytes for piece in living)
        assert slabs.total_bytes <= budget + MIN_SLAB
    slabs.release(living)
    assert slabs.used_bytes == 0
    # Nothing is in pieces: the whole budget can be had at once.
    slabs.release([slabs.allocate(budget)])
    slabs.close()


def test_a_pool_used_for_long_stays_as_large_as_its_busiest_moment(memory: Path, disk: Path) -> None:
    slabs = pool(memory, disk, 2**30, warm_bytes=2**30)
    living: list[Extent] = []
    most = 0
    for turn in range(3000):
        living.append(slabs.allocate(64 * 1024 + (turn * 7919) % (2 * MIB)))
        most = max(most, slabs.used_bytes)
        if len(living) > 40:
            slabs.release([living.pop((turn * 31) % 40)])
    assert slabs.total_bytes <= most + 2 * MIN_SLAB
    slabs.release(living)
    slabs.close()


# -- both ends -------------------------------------------------------------------------------------


def mapped_bytes(part: str) -> int:
    """The size of this process's mappings of files whose path contains ``part``."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if part in line:
                first, last = line.split(" ", 1)[0].split("-")
                total += int(last, 16) - int(first, 16)
    return total


class Worker:
    """A pool behind a release that answers as a worker's does; it can be out of reach."""

    def __init__(self, slabs: SlabPool) -> None:
        self.slabs = slabs
        self.asked = 0
        self.reachable = True

    def release(self, pieces: bytes) -> list[str] | None:
        if not self.reachable:
            return None
        self.asked += 1
        self.slabs.release(decode(pieces))
        return self.slabs.given_up()


def bring(slabs: SlabPool, home: Homecoming, nbytes: int) -> torch.Tensor:
    layout = Layout.of({"x": torch.full((nbytes,), 7, dtype=torch.uint8)}, name="saves")
    extent = slabs.allocate(layout.nbytes)
    layout.copy_into(slabs.view(extent))
    found: torch.Tensor = home.open(layout.packed(extent))[1]["x"]
    return found


def test_memory_returns_to_the_system_though_pieces_went_back_by_the_way(memory: Path, disk: Path) -> None:
    """A collect carries pieces back and no answer; what the worker gave up for them is asked for."""
    slabs = pool(memory, disk, 0, 512 * MIB)
    worker = Worker(slabs)
    home = Homecoming(worker.release)
    bring(slabs, home, 10 * MIB)
    gc.collect()
    pieces = home.returned()  # as the driver does
    if pieces is not None:
        slabs.release(decode(pieces))
    until(lambda: slabs.total_bytes == 0, 5)
    until(lambda: mapped_bytes(str(disk)) == 0, 5, "the kernel kept a slab that its worker gave up")
    asked = worker.asked
    assert asked >= 1
    home.close()


def test_idle_memory_really_returns_to_the_system(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "IDLE_S", 0.5)
    monkeypatch.setattr(slab, "KEEP_BYTES", MIN_SLAB)
    monkeypatch.setattr(homecoming, "_TELL_S", 0.1)
    slabs = pool(memory, disk, 2**30, warm_bytes=2**30)
    worker = Worker(slabs)
    home = Homecoming(worker.release)
    kept = [bring(slabs, home, MIN_SLAB) for _ in range(4)]
    assert mapped_bytes(str(memory)) >= 8 * MIN_SLAB  # the worker's mapping and the reader's
    last = kept[-1]
    del kept
    gc.collect()
    until(lambda: slabs.total_bytes == 2 * MIN_SLAB, 10)  # what is looked at, and what is kept
    until(lambda: mapped_bytes(str(memory)) == 4 * MIN_SLAB, 5)
    assert last.eq(7).all()
    until(lambda: not home._worth_asking(), 5)
    asked = worker.asked
    time.sleep(1.2)  # nothing to wait for: this is that nothing happens
    assert worker.asked == asked
    slabs.close()
    home.close()


def test_two_threads_that_return_pieces_return_each_once(memory: Path, disk: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    home = Homecoming(lambda pieces: None)
    home.close()
    home._thread.join()
    pieces = [Extent("p", 1, number, 1, 0) for number in range(2000)]
    with ThreadPoolExecutor(4) as threads:
        for piece in pieces:
            home._let_go.append(piece)
        answers = list(threads.map(lambda _: home.returned(), range(4000)))
    returned = [piece for answer in answers if answer for piece in decode(answer)]
    assert sorted(piece.offset for piece in returned) == list(range(2000))


# -- sweeping --------------------------------------------------------------------------------------

_HOLDS = """
import sys, time
from pathlib import Path
from nnsight_lab.saves.slab import Place, SlabPool
folder = Path(sys.argv[1])
slabs = SlabPool("swept", 0, [Place(folder, 2**30), Place(folder, 0)])
print(slabs.allocate(1).path, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("pid", ["its own", "of nobody", "of somebody else"])
def test_a_slab_of_a_living_worker_is_never_swept_and_that_of_a_killed_one_always(
    tmp_path: Path, pid: str
) -> None:
    """By its lock: pids are used again, zombies have one, other containers' are not seen."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        path = Path(worker.stdout.readline().strip())
        if pid != "its own":
            parts = path.name.rsplit(".", 3)
            other = "999999999" if pid == "of nobody" else str(os.getpid())
            path = path.rename(path.with_name(".".join([parts[0], other, *parts[2:]])))
        if pid == "of somebody else":
            os.utime(path, (0, 0))  # of a process that runs, only an old file can be another's
        assert slab_files.sweep([tmp_path]) == []
        worker.kill()
        # It is a zombie, and has a pid; its threads may take a moment more.
        assert until(lambda: slab_files.sweep([tmp_path]), 5) == [path]
        assert worker.returncode is None
    finally:
        worker.kill()
        worker.communicate()


def test_a_slab_that_goes_while_it_is_looked_at_is_no_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "nnsight_lab.x.999999999.0.0").symlink_to(tmp_path / "nowhere")
    (tmp_path / "nnsight_lab.x.999999998.0.0").write_bytes(b"x")
    assert [path.name for path in slab_files.sweep([tmp_path, tmp_path / "missing"])] == [
        "nnsight_lab.x.999999998.0.0"
    ]


def test_a_reader_whose_slab_was_unlinked_meanwhile_still_maps_it(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs = pool(memory, disk, 256 * MIB)
    extent = slabs.allocate(1)
    remove = os.unlink

    def twice(path: Any, **more: Any) -> None:
        remove(path, **more)
        remove(path, **more)

    monkeypatch.setattr(os, "unlink", twice)
    assert SlabReader(lambda piece: None).open(extent).numel() == extent.nbytes
    slabs.close()


# -- settings --------------------------------------------------------------------------------------


def test_without_shared_memory_or_a_home_the_budgets_are_nothing_and_a_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homecoming, "_MEMORY", tmp_path / "no-shm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    found = homecoming.settings("x", {})
    assert (found["memory_bytes"], found["spill_bytes"]) == (0, 0)
    assert homecoming.reclaim() == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert homecoming.settings("x", {})["spill_bytes"] > 0
    assert homecoming.settings("x", {"spill_budget": 0})["spill_bytes"] == 0


def test_a_copy_that_fails_is_that_blocks_error_and_takes_no_memory(
    memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnsight_lab.worker.courier import Courier

    def fail(*args: Any, **more: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    sizes = {"memory_bytes": 256 * MIB, "spill_bytes": 0}
    places = {"name": "room", "memory_dir": str(memory), "spill_dir": str(disk)}
    courier = Courier({**places, **sizes}, 0, torch.device("cpu"))
    monkeypatch.setattr(Layout, "copy_into", fail)
    parcel = courier.pack({"x": torch.zeros(MIB)})
    assert parcel.packed is None
    assert parcel.error is not None
    assert "CUDA out of memory" in parcel.error.message
    assert courier.used_bytes == 0
    courier.close()


@pytest.mark.parametrize("megabytes", [5, 17, 25, 40, 50, 63])
def test_pieces_of_one_size_fill_the_memory_before_any_goes_to_disk(
    memory: Path, disk: Path, megabytes: int
) -> None:
    wanted, budget = megabytes * MIB, 10 * MIN_SLAB
    slabs = pool(memory, disk, budget, 10 * MIN_SLAB)
    held = []
    while not held or not held[-1].path.startswith(str(disk)):
        held.append(slabs.allocate(wanted))
    in_memory = (len(held) - 1) * wanted
    assert budget - in_memory < max(wanted, MIN_SLAB // 8)
    slabs.release(held)
    slabs.close()

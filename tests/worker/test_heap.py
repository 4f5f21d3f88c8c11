"""Free memory of the C heap goes back to the system, and not too often."""

from __future__ import annotations

import psutil

from nnsight_lab.worker.heap import Heap


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def holes() -> list[object]:
    """64 MB of blocks below glibc's own threshold for maps, every other one freed."""
    import torch

    blocks = [torch.full((8_192,), 1, dtype=torch.uint8) for _ in range(8_192)]
    return blocks[::2]


def test_what_is_free_between_what_is_not_goes_back() -> None:
    heap = Heap(on_cpu=True, every_s=0)
    kept = holes()
    before = resident()
    assert heap.trim()
    assert before - resident() > 10 * 10**6
    assert len(kept) == 4_096


def test_a_heap_is_trimmed_once_in_a_while_or_at_once() -> None:
    heap = Heap(on_cpu=True, every_s=3600)
    assert not heap.trim()
    assert heap.trim(at_once=True)
    assert not heap.trim()
    assert heap.trims == 1


def test_on_a_gpu_nothing_is_trimmed() -> None:
    heap = Heap(on_cpu=False, every_s=0)
    assert not heap.trim(at_once=True)

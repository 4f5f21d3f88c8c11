"""Ending a kept engine, and what that freed; by whoever asks for it, with a kernel or without."""

from __future__ import annotations

import time

from nnsight_lab.engine import kept, processes
from nnsight_lab.engine.kept import Kept
from nnsight_lab.engine.status import StopReport


def report(name: str, record: Kept, began: float) -> StopReport:
    """End a kept engine, and say what that freed.

    Args:
        name: What it is called where that is said.
        record: Its.
        began: When that was asked for, by ``time.monotonic()``.
    """
    alive = processes.engine_processes(record.engine)
    on_gpu = processes.gpu_bytes(process.pid for process in alive)
    ended = kept.end(record)
    return StopReport(
        name=name,
        pids=tuple(process.pid for process in alive),
        left=tuple(ended.left),
        freed_bytes=sum(process.rss_bytes for process in alive if process.pid not in ended.left),
        elapsed_s=time.monotonic() - began,
        freed_gpu_bytes=0 if ended.left else on_gpu,
    )

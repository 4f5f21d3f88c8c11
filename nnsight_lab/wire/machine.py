"""The words between a Jupyter server and JupyterLab's panel, and the records the panel is told.

`labextension/src/lab/machineWire.ts` mirrors this file, and a test compares the two, names and types. The
server knows what no kernel can say of itself: which engines live on its machine though their kernel is gone,
or computes in C code and answers nobody; and the GPUs. Page and server may be of different versions, as after
an upgrade without a restart, so each says its `PROTOCOL`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: One more whenever a field or a word changes its meaning or goes. A new kind of engine is no such change.
PROTOCOL: Final = 1

#: Below the server's base address: GET ROUTE/STATUS, GET ROUTE/LOG?ENGINE=id, POST ROUTE/ORPHANS/id/END,
#: POST ROUTE/KEPT/id/END.
ROUTE: Final = "nnsight-lab/api"
STATUS: Final = "status"
LOG: Final = "log"
ENGINE: Final = "engine"
ORPHANS: Final = "orphans"
END: Final = "end"

#: Kinds of engines. A page shows one that it does not know, and offers nothing for it.
KERNEL: Final = "kernel"
ORPHAN: Final = "orphan"
#: Of no kernel: it goes on when they end, and any of this user's may attach.
KEPT: Final = "kept"


@dataclass(frozen=True)
class MachineEngine:
    """An engine of this user on the server's machine, by its processes.

    Attributes:
        engine: Its id. kind: `KERNEL` where the kernel that started it lives, `ORPHAN` where it is gone,
        `KEPT` where it needs none. name: "" where that is not known, as is `model`. owner_pid: The kernel's
        process; 0 where that is not known. kernel_id: The kernel's id, where it is one of this server's; else
        "". age_s: Since its first process began. log: The path of its log. attach: The line that attaches a
        kernel to it; "" where none can, yet or at all.
    """

    engine: str
    kind: str
    name: str
    model: str
    owner_pid: int
    kernel_id: str
    pids: list[int]
    memory_bytes: int
    gpu_bytes: int
    age_s: float
    log: str
    attach: str


@dataclass(frozen=True)
class MachineGpuProcess:
    """A process on a GPU.

    Attributes:
        owner: The user it belongs to; "" where this server may not know.
        engine: The id of the engine it belongs to; "" where it is none of this user's.
    """

    pid: int
    used_bytes: int
    owner: str
    engine: str


@dataclass(frozen=True)
class MachineGpu:
    """A GPU.

    Attributes:
        used_bytes: Of everybody.
        busy: Percent of the last second; -1 where that is not known.
    """

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    busy: int
    processes: list[MachineGpuProcess]


@dataclass(frozen=True)
class MachineStatus:
    """Everything a server tells of its machine.

    Attributes:
        user: Whose engines these are.
        gpus_trouble: Why the driver told nothing of its GPUs; "" where there are none, or it did.
    """

    protocol: int
    version: str
    host: str
    user: str
    engines: list[MachineEngine]
    gpus: list[MachineGpu]
    gpus_trouble: str


@dataclass(frozen=True)
class MachineAnswer:
    """What came of something that was asked for: words, or a log's text."""

    ok: bool
    text: str

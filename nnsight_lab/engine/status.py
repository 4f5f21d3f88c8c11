"""What an engine is doing, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StartProgress:
    """A start under way.

    Attributes:
        phase: What is being done now.
        elapsed_s: Since the start began.
        done: The phases before, with the seconds each took.
    """

    phase: str
    elapsed_s: float
    done: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class EngineStatus:
    """An engine as it stands.

    Attributes:
        name: What the manager calls it.
        state: ``starting``, ``ready``, ``busy``, ``dead`` or ``stopped``.
        model: As the user gave it.
        mode: ``sync`` or ``async``.
        device: ``cpu`` or ``cuda``.
        dtype: Of the weights.
        up_s: Seconds since it was ready.
        running: Requests queued or running.
        edits: ``name (on)`` of each edit.
        pids: The engine's processes.
        memory_bytes: Resident memory of those processes together.
        gpu_bytes: GPU memory of those processes, where the driver tells.
        log: The log's path.
        options: vLLM options it was started with.
        cause: Why it is dead.
        level: How far the users of a shared engine are trusted, in words.
        jail: What its workers are kept from, and what not.
        steps: How its steps ran, by kind, or why nothing is replayed; "" where that is not known.
        module_by_module: Why some ran module by module.
        last_call: The same of the last call with blocks, where they made steps run module by module.
    """

    name: str
    state: str
    model: str
    mode: str
    device: str = ""
    dtype: str = ""
    up_s: float = 0.0
    running: int = 0
    edits: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    memory_bytes: int = 0
    gpu_bytes: int = 0
    log: str = ""
    options: tuple[tuple[str, object], ...] = field(default=())
    cause: str = ""
    level: str = ""
    jail: str = ""
    steps: str = ""
    module_by_module: str = ""
    last_call: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line, for any table."""
        rows = [
            ("engine", f"{self.name}: {self.state}"),
            ("model", f"{self.model} ({self.dtype}, {self.device}, {self.mode})"),
            ("options", ", ".join(f"{k}={v!r}" for k, v in self.options) or "none"),
            ("up", duration(self.up_s)),
            ("requests", f"{self.running} running or waiting"),
            ("edits", ", ".join(self.edits) or "none"),
            *((label, text) for label, text in self._steps() if text),
            ("processes", f"{', '.join(map(str, self.pids)) or 'none'} ({self._memory()})"),
            ("log", self.log),
        ]
        rows += [(label, text) for label, text in (("level", self.level), ("jail", self.jail)) if text]
        if self.cause:
            rows.insert(1, ("cause", self.cause))
        return rows

    def _steps(self) -> tuple[tuple[str, str], ...]:
        why = f" ({self.module_by_module})" if self.module_by_module else ""
        return (("steps", f"{self.steps}{why}"), ("last call", self.last_call))

    def _memory(self) -> str:
        gpu = f", {self.gpu_bytes / 2**30:.1f} GiB on the GPU" if self.gpu_bytes else ""
        return f"{self.memory_bytes / 2**30:.2f} GiB{gpu}"

    def __str__(self) -> str:
        return "\n".join(f"{label:<10} {text}" for label, text in self.rows())


@dataclass(frozen=True)
class StopReport:
    """What a stop saw: that the processes are gone and their memory is back.

    Attributes:
        name: The engine.
        pids: The processes it had.
        left: Those that would not end; empty when all is well.
        freed_bytes: Resident memory they held.
        freed_gpu_bytes: GPU memory they held, where the driver tells.
        elapsed_s: How long it took.
    """

    name: str
    pids: tuple[int, ...]
    left: tuple[int, ...]
    freed_bytes: int
    elapsed_s: float
    freed_gpu_bytes: int = 0

    def __str__(self) -> str:
        if self.left:
            return f"Engine {self.name!r}: processes {', '.join(map(str, self.left))} would not end."
        gpu = f" and {self.freed_gpu_bytes / 2**30:.1f} GiB of GPU memory" if self.freed_gpu_bytes else ""
        return (
            f"Engine {self.name!r} stopped in {self.elapsed_s:.1f} s: {len(self.pids)} processes gone, "
            f"{self.freed_bytes / 2**30:.2f} GiB of memory{gpu} back."
        )


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 5 s``, ``2 h 10 min``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

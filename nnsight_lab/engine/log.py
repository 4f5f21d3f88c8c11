"""An engine's log file: its tail, the phase of a start, and the root cause of a failure.

vLLM says "Engine core initialization failed. See root cause above", and in a notebook nothing is
above; the cause is a line of some worker's traceback, hundreds of lines up. So all processes log to
one file, and the first exception in it that is not a consequence of another is what people see.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from nnsight_lab.engine.processes import engine_processes
from nnsight_lab.saves.state import state_dir
from nnsight_lab.wire.keys import stop_file

#: vLLM prefixes: "(EngineCore pid=1) ERROR 11-29 18:00:00 [core.py:1] ".
_PREFIX = re.compile(r"^(\([^)]*\)\s*)*([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?)?")
_EXCEPTION = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Refused|Died|Changed|Failed))(?:: (?P<text>.*))?$"
)
#: Exceptions that only say that another process failed.
_CONSEQUENCE = re.compile(
    r"(EngineDeadError|Engine core initialization failed|WorkerProc initialization failed|"
    r"Executor failed|Cancelled|EngineCore encountered|See root cause|KeyboardInterrupt|SystemExit|"
    r"BrokenPipeError|ConnectionResetError|EOFError$)"
)
#: What vLLM writes of a process that ended by itself; what fails after that fails for it.
_DEATH = re.compile(
    r"(?P<kind>Worker|Engine core) proc (?P<name>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+)\))?"
)
#: From the first process until one of them has something to say.
SPAWNING = "starting the processes"
#: What the log says when a phase of a start begins, in order.
_PHASES = (
    (
        re.compile(r"Initializing a V1 LLM engine|init engine|rank \d+ in world size"),
        SPAWNING,
    ),
    (
        re.compile(r"Starting to load model|Loading (safetensors|model weights)|Loading weights"),
        "loading the weights",
    ),
    (re.compile(r"Loading weights took|Model loading took"), "preparing memory"),
    (
        # Not every "compile": the configuration that vLLM prints first is full of the word.
        re.compile(
            r"Warming up|Capturing CUDA graph|Graph capturing|Compiling a graph|torch\.compile took|"
            r"KV cache size:|init engine \(profile"
        ),
        "warming up",
    ),
)


#: What stands behind an engine's name in the name of its log.
_STAMP = re.compile(r"-\d{8}-\d{6}-\d+-\d+\.log$")


def _written(path: Path) -> float:
    """When a file was last written; one that another process has just removed is the oldest."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


class EngineLog:
    """One engine's log.

    Attributes:
        path: The file; every process of the engine appends to it.
    """

    KEPT = 20

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started_bytes = 0

    @classmethod
    def new(cls, name: str) -> EngineLog:
        """A fresh log for engine ``name``; old ones beyond the last `KEPT` are removed."""
        folder = state_dir() / "logs"
        folder.mkdir(exist_ok=True, mode=0o700)
        logs = sorted(folder.glob("*.log"), key=_written)
        living = {process.log for process in engine_processes()} if len(logs) > cls.KEPT else set()
        for old in [path for path in logs[: -cls.KEPT] if str(path) not in living]:
            old.unlink(missing_ok=True)
            old.with_suffix(".json").unlink(missing_ok=True)
            stop_file(old).unlink(missing_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = (
            folder
            / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{stamp}-{os.getpid()}-{time.time_ns() % 10**6}.log"
        )
        path.touch(mode=0o600)
        return cls(path)

    def vllm_config(self) -> Path:
        """A logging configuration that sends vLLM's records to this file, for its processes."""
        path = self.path.with_suffix(".json")
        handler = {
            "class": "logging.FileHandler",
            "filename": str(self.path),
            "formatter": "vllm",
            "level": "INFO",
        }
        line = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
        formatter = {"format": line, "datefmt": "%m-%d %H:%M:%S"}
        logger = {"handlers": ["file"], "level": "INFO", "propagate": False}
        path.write_text(
            json.dumps(
                {
                    "version": 1,
                    "disable_existing_loggers": False,
                    "formatters": {"vllm": formatter},
                    "handlers": {"file": handler},
                    "loggers": {"vllm": logger, "nnsight_lab": logger},
                }
            )
        )
        return path

    def text(self) -> str:
        """The whole log."""
        return self._bytes().decode(errors="replace")

    def _bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError:
            return b""

    def tail(self, lines: int = 40) -> str:
        """The last ``lines`` lines."""
        return "\n".join(self.text().splitlines()[-lines:])

    def phase(self) -> str | None:
        """The latest phase of a start that the log shows, or None before the first."""
        text, found = self.text(), None
        for pattern, phase in _PHASES:
            if pattern.search(text):
                found = phase
        return found

    def started(self) -> None:
        """The engine is up: what the start said on its way is no cause of what happens later."""
        try:
            self._started_bytes = self.path.stat().st_size
        except OSError:
            self._started_bytes = 0

    def root_cause(self) -> str:
        """The first exception in the log that is not a consequence of another; "" when there is none.

        Of an engine that was up, only what was said since.

        A process that ended without one (killed, by the system for its memory or by somebody) is one, too:
        whatever else is in the log then, depending on who waited for whom, is a consequence.
        """
        consequence = ""
        said_since = self._bytes()[self._started_bytes :].decode(errors="replace")
        lines = [_PREFIX.sub("", line).rstrip() for line in said_since.splitlines()]
        for number, line in enumerate(lines):
            death = _DEATH.search(line)
            if death is not None:
                return _ended(death)
            match = _EXCEPTION.match(line)
            if match is None:
                continue
            said = line
            if match["type"].endswith("ValidationError") and number + 1 < len(lines):
                # pydantic's heading counts errors; what is wrong is below it.
                said = lines[number + 1].strip().partition(" [type=")[0]
            # A message may go on over several lines; the first is the sentence.
            if not match["text"] and number + 1 < len(lines):
                said = f"{line}: {lines[number + 1]}".rstrip(": ")
            if _CONSEQUENCE.search(said):
                consequence = consequence or said
                continue
            return said
        return consequence


def consequence(said: str) -> bool:
    """Whether an exception only says that another process failed."""
    return bool(_CONSEQUENCE.search(said))


def engine_name(path: str) -> str:
    """The name of the engine that logs to ``path``; "" where that is no log of an engine."""
    name, stamped = _STAMP.subn("", os.path.basename(path))
    return name if stamped else ""


def _ended(death: re.Match[str]) -> str:
    """``"the process VLLM::Worker-0 was killed by SIGKILL"``, and who does such things."""
    who = f"the {death['kind'].lower()} process {death['name']}"
    if death["code"] is None:  # vLLM looked before the system had told
        return f"{who} ended unexpectedly (killed, perhaps by the system's out-of-memory killer)"
    code = int(death["code"])
    if code >= 0:
        return f"{who} ended by itself (exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    said = f"{who} was killed by {name}"
    return f"{said} (the system's out-of-memory killer does that)" if name == "SIGKILL" else said

"""Real kernels of chosen ipykernel versions, and what they send back for a cell, with times.

Three versions behave differently where it matters here (interrupts of async cells, messages while a cell
runs), so each is a directory made by `pip install --target`, put first on the kernel's path. The kernel is
started as a front end starts it: an interrupt is SIGINT to its whole process group.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from nnsight_lab.engine.processes import EngineProcess, end, engine_processes

ROOT = Path(__file__).parents[2]
#: What a wait for a cell may take; an engine's first start on two shared cores takes about a minute.
CELL_LIMIT_S = 240.0
#: Small, so that several engines fit on one machine; and quick to set to zero.
ENGINE_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: What a version needs that another does not.
_OWN_REQUIREMENTS = {"6.31": ["nest-asyncio"]}

Message = dict[str, Any]


def plain(text: str) -> str:
    """Text without its colours."""
    return _ANSI.sub("", text)


def wait_until(true: Callable[[], object], limit_s: float, what: str, tick_s: float = 0.02) -> float:
    """Waits for a condition, and returns how long it took; it is asked every ``tick_s``."""
    began_s = time.monotonic()
    tick = queue.SimpleQueue[None]()
    while not true():
        if time.monotonic() - began_s > limit_s:
            raise AssertionError(f"{what}: not within {limit_s} s")
        try:
            tick.get(timeout=tick_s)
        except queue.Empty:
            continue
    return time.monotonic() - began_s


def library(version: str) -> Path | None:
    """The directory that holds an ipykernel version, made if need be; None where it is installed anyway."""
    if metadata.version("ipykernel").startswith(f"{version}."):
        return None
    target = ROOT / ".venvs" / f"ipykernel-{version}"
    done = target / ".done"
    if not done.exists():
        wanted = [f"ipykernel=={version}.*", *_OWN_REQUIREMENTS.get(version, [])]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(target), *wanted], check=True, timeout=300)
        done.touch()
    return target


@dataclass
class Ran:
    """What a kernel sent back for one cell.

    Attributes:
        messages: Everything on the iopub channel, in order.
        reply: The content of the answer on the shell channel.
        elapsed_s: From sending the cell to its end.
    """

    messages: list[Message] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The contents of the messages of one kind."""
        return [message["content"] for message in self.messages if message["msg_type"] == kind]

    @property
    def ok(self) -> bool:
        return self.reply.get("status") == "ok"

    @property
    def error(self) -> str:
        """The error as it is shown, without colours; "" when there was none."""
        return "\n".join(plain("\n".join(error["traceback"])) for error in self.of("error"))

    @property
    def stdout(self) -> str:
        return "".join(content["text"] for content in self.of("stream") if content["name"] == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(content["text"] for content in self.of("stream") if content["name"] == "stderr")

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The outputs as they stand at the end: one that was updated in place is there once."""
        by_id: dict[str, dict[str, Any]] = {}
        for number, message in enumerate(self.messages):
            if message["msg_type"] in ("display_data", "update_display_data", "execute_result"):
                content = message["content"]
                shown_id = content.get("transient", {}).get("display_id") or f"output {number}"
                by_id[shown_id] = content["data"]
        return list(by_id.values())

    @property
    def texts(self) -> list[str]:
        """The plain form of each output."""
        return [str(data["text/plain"]) for data in self.shown]


class Running:
    """A cell under way."""

    def __init__(self, kernel: Kernel, cell: str) -> None:
        self.ran = Ran()
        self._kernel = kernel
        self._began_s = time.monotonic()
        self._id = kernel.client.execute(cell, allow_stdin=False)

    def until(self, wanted: Callable[[Message], object], limit_s: float = CELL_LIMIT_S) -> float:
        """Takes messages until one is as wanted; returns when it came (`time.monotonic`).

        Raises:
            AssertionError: The limit passed, the cell ended, or the kernel died.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            message = self._next(deadline_s)
            if message is None:
                continue
            if wanted(message):
                return time.monotonic()
            assert not _is_idle(message), f"the cell ended first: {self.ran.messages}"

    def finish(self, limit_s: float = CELL_LIMIT_S) -> Ran:
        """Waits for the end of the cell."""
        deadline_s = time.monotonic() + limit_s
        while not (self.ran.messages and _is_idle(self.ran.messages[-1])):
            self._next(deadline_s)
        self.ran.elapsed_s = time.monotonic() - self._began_s
        while not self.ran.reply:
            reply = self._kernel.client.get_shell_msg(timeout=max(0.1, deadline_s - time.monotonic()))
            if reply["parent_header"].get("msg_id") == self._id:
                self.ran.reply = reply["content"]
        return self.ran

    def _next(self, deadline_s: float) -> Message | None:
        assert time.monotonic() < deadline_s, f"no end within the limit; so far: {self.ran.messages}"
        try:
            message: Message = self._kernel.client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            assert self._kernel.manager.is_alive(), "the kernel died"
            return None
        if message["parent_header"].get("msg_id") != self._id:
            return None
        self.ran.messages.append(message)
        return message


class Kernel:
    """One kernel of one ipykernel version.

    Attributes:
        version: As in `7.4`.
        manager: jupyter_client's.
        client: jupyter_client's, with its channels open.
        started: What the cell that started its engine showed, once it has one.
    """

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.started: Ran | None = None
        specs = folder / "kernels"
        path = library(version)
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": f"ipykernel {version}",
            "language": "python",
        }
        (specs / "lab").mkdir(parents=True, exist_ok=True)
        (specs / "lab" / "kernel.json").write_text(json.dumps(spec))
        paths = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **ENGINE_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        self.manager = KernelManager(
            kernel_name="lab", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs)])
        )
        self.manager.start_kernel(env=environment, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=90)
        # The local provisioner's; the base class that jupyter_client declares has none.
        self.pid = int(getattr(self.manager.provisioner, "pid", 0))

    def submit(self, cell: str) -> Running:
        """Sends a cell and does not wait."""
        return Running(self, cell)

    def run(self, cell: str, limit_s: float = CELL_LIMIT_S) -> Ran:
        """Runs a cell to its end."""
        return self.submit(cell).finish(limit_s)

    def good(self, cell: str, limit_s: float = CELL_LIMIT_S) -> Ran:
        """Runs a cell that must not fail."""
        ran = self.run(cell, limit_s)
        assert ran.ok, ran.error
        return ran

    def value(self, expression: str) -> Any:
        """The value of an expression that prints as a Python literal."""
        return ast.literal_eval(self.good(f"print(repr({expression}))").stdout.strip())

    def interrupt(self) -> float:
        """Presses the stop button; returns when (`time.monotonic`)."""
        pressed_s = time.monotonic()
        self.manager.interrupt_kernel()
        return pressed_s

    def complete(self, marked: str) -> list[str]:
        """What completion offers at the `|` of a cell."""
        cell, at = marked.replace("|", "", 1), marked.index("|")
        reply = self.client.complete(cell, at, reply=True, timeout=60)
        return list(reply["content"]["matches"])

    def details(self, marked: str) -> dict[str, str]:
        """What completion offers at the `|` of a cell, each with what a front end shows beside it."""
        cell, at = marked.replace("|", "", 1), marked.index("|")
        reply = self.client.complete(cell, at, reply=True, timeout=60)
        found = reply["content"]["metadata"]["_jupyter_types_experimental"]
        return {item["text"]: item["type"].replace("\u00a0", " ") for item in found}

    def inspect(self, marked: str) -> str:
        """What Shift+Tab shows at the `|` of a cell; "" for nothing."""
        cell, at = marked.replace("|", "", 1), marked.index("|")
        reply = self.client.inspect(cell, at, reply=True, timeout=60)["content"]
        assert reply["status"] == "ok"
        return plain(reply["data"]["text/plain"]) if reply["found"] else ""

    def engine_processes(self) -> list[EngineProcess]:
        """The engine processes that this kernel started."""
        return [found for found in engine_processes() if found.owner.startswith(f"{self.pid}:")]

    @property
    def alive(self) -> bool:
        return bool(self.manager.is_alive())

    def start_engine(self) -> None:
        """Loads the extension and starts the engine that the tests share."""
        self.good("%load_ext nnsight_lab\nimport nnsight_lab as lab")
        self.started = self.good("%engine start demo max_model_len=1024")

    def close(self) -> None:
        """Ends the kernel and sees that nothing of it is left."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()
        try:
            wait_until(lambda: not self.engine_processes(), 15, "engine processes outlive their kernel")
        finally:
            end([process.pid for process in self.engine_processes()])


def _is_idle(message: Message) -> bool:
    return bool(message["msg_type"] == "status" and message["content"]["execution_state"] == "idle")

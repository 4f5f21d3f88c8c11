"""What a page that looks at the panel costs the requests of its kernel.

A real kernel, asked as JupyterLab asks it: cells on the shell channel, and a comm on which a page says that
it looks, also at the saves, as often as it may. The same cell runs with the page looking and with the page
hidden, in interleaved rounds. No browser draws here, which would take the processor that the engine wants;
what is measured is what the kernel does for a page. Each round begins with a whole status and the labels of
the newest saves, as when somebody opens the panel.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nnsight_lab import pins
from nnsight_lab.bench import rounds
from nnsight_lab.errors import EngineError
from nnsight_lab.wire import panel as wire

_START_LIMIT_S = 600.0
_CELL_LIMIT_S = 300.0
#: Saves something for every request, so that there are new saves to tell.
_EDIT = "%%edit seen\nhidden = model.model.layers[3].output[0].save()"


def measure(
    model: str = "demo",
    *,
    mode: str = "async",
    count: int = 32,
    tokens: int = 24,
    repeat: int = 15,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Generate with a page looking, and without.

    Args:
        model: As for `nnsight_lab.start`.
        mode: As for `nnsight_lab.start`.
        count: How many prompts a call runs.
        tokens: New tokens of each.
        repeat: Rounds that count.
        say: Told what is going on.
        **options: vLLM engine options.

    Returns:
        The ratios, the seconds behind them, and how many statuses the page was told.
    """
    options.setdefault("max_model_len", 512)
    with tempfile.TemporaryDirectory() as folder, _kernel(Path(folder)) as kernel:
        say("starting an engine in a kernel")
        begin = f"lab.start({model!r}, mode={mode!r}, name='bench-panel', **{options!r})"
        kernel.run(f"%load_ext nnsight_lab\nimport nnsight_lab as lab\nengine = {begin}", _START_LIMIT_S)
        kernel.run("model = engine.model\nfrom nnsight_lab.bench.engine import prompts")
        kernel.run(_EDIT)
        kernel.open_page()

        def generate(edits: list[str], looking: bool) -> Callable[[], None]:
            call = (
                f"_ = engine.generate(prompts({count}), edits={edits!r}, max_tokens={tokens}, "
                "temperature=0.0, ignore_eos=True)"
            )

            def run() -> None:
                kernel.look(looking)
                kernel.run(call)

            return run

        works = {
            "with": generate([], True),
            "without": generate([], False),
            "saving_with": generate(["seen"], True),
            "saving_without": generate(["seen"], False),
        }
        seen = rounds.run(works, repeat, warm_up=2, say=say)
        kernel.run("lab.stop(engine.name)")
        return {
            "generate_with_panel_vs_without": round(seen.ratio("with", "without"), 4),
            "saving_generate_with_panel_vs_without": round(seen.ratio("saving_with", "saving_without"), 4),
            "statuses": kernel.statuses,
            "seconds": {name: round(seen.median(name), 4) for name in works},
            "spread": round(_spread(seen.seconds["without"]), 4),
            "rounds": repeat,
            "prompts": count,
            "new_tokens": tokens,
            "mode": mode,
            "versions": {name: pins.version_of(name) for name in ("ipykernel", "nnsight")},
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
        }


def _spread(seconds: tuple[float, ...]) -> float:
    """How far the middle half of the same work's rounds is apart, as a part of their median."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / ordered[len(ordered) // 2]


class _Kernel:
    """A kernel, and one page of its panel."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._comm = uuid.uuid4().hex
        self._closed = threading.Event()
        self.statuses = 0
        # What the kernel tells is read as it comes, as a page does: a full socket would hold the kernel up.
        self._reader = threading.Thread(target=self._read, daemon=True, name="nnsight-lab-bench-page")
        self._reader.start()

    def close(self) -> None:
        self._closed.set()
        self._reader.join(timeout=5)

    def run(self, code: str, limit_s: float = _CELL_LIMIT_S) -> None:
        """Run a cell to its end.

        Raises:
            EngineError: It raised, or did not end.
        """
        message_id = self._client.execute(code, allow_stdin=False)
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            try:
                reply = self._client.get_shell_msg(timeout=1)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") == message_id:
                if reply["content"]["status"] != "ok":
                    raise EngineError(f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}")
                return
        raise EngineError(f"a cell did not end within {limit_s:.0f} s: {code[:60]}")

    def open_page(self) -> None:
        self._say("comm_open", {"target_name": wire.COMM_TARGET, "data": self._looks(False)})

    def look(self, visible: bool) -> None:
        """The page is looked at, or no longer."""
        self._say("comm_msg", {"data": self._looks(visible)})

    @staticmethod
    def _looks(visible: bool) -> dict[str, Any]:
        # The kernel does not go below its own least, whatever is asked for.
        return {wire.VISIBLE: visible, wire.SAVES: visible, wire.EVERY_S: 0}

    def _say(self, kind: str, content: Mapping[str, Any]) -> None:
        message = self._client.session.msg(kind, {"comm_id": self._comm, **content})
        self._client.shell_channel.send(message)

    def _read(self) -> None:
        while not self._closed.is_set():
            try:
                message = self._client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            if message["msg_type"] == "comm_msg" and message["content"].get("comm_id") == self._comm:
                self.statuses += 1


@contextmanager
def _kernel(folder: Path) -> Iterator[_Kernel]:
    """A kernel of this very Python."""
    # Local: only who measures a kernel needs what starts one.
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=40"],
        "display_name": "bench",
        "language": "python",
    }
    (folder / "bench").mkdir()
    (folder / "bench" / "kernel.json").write_text(json.dumps(spec))
    manager = KernelManager(
        kernel_name="bench", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder)])
    )
    manager.start_kernel(cwd=str(folder))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        kernel = _Kernel(client)
        try:
            yield kernel
        finally:
            kernel.close()
    finally:
        client.stop_channels()
        manager.shutdown_kernel()

"""The panel's two doors into a kernel: requests on the control channel, and a comm for what changes.

The control channel has a thread of its own in ipykernel 6 and 7, so a status is answered while a cell
computes. An unknown request is logged by ipykernel and never answered: that is how a page knows that this
package is not loaded. But each control request also makes a busy kernel look idle for a moment
(jupyter_client#838). So a page that has a comm is told on it: whenever something changed, at most twice a
second, and every few seconds at least; only while it says that it is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from nnsight_lab.engine import edits
from nnsight_lab.panel.actions import Actions
from nnsight_lab.panel.snapshot import Snapshots
from nnsight_lab.panel.surroundings import Surroundings
from nnsight_lab.wire import panel as wire

#: Between two looks for changes.
_TICK_S = 0.5
#: A page that nothing changed for is told no oftener.
_LEAST_S = 3.0
_ATTRIBUTE = "_nnsight_lab_panel"


class Control:
    """The doors of one kernel.

    Args:
        shell: The kernel's; its ``kernel`` is ipykernel's.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._kernel = shell.kernel
        self._surroundings = Surroundings()
        self._snapshots = Snapshots(self._surroundings)
        self._actions = Actions(self._surroundings, shell.user_ns)
        self._pages: dict[str, _Page] = {}
        self._lock = threading.Lock()
        self._stir = threading.Event()
        self._closed = threading.Event()
        self._pusher: threading.Thread | None = None

    def open(self) -> None:
        """Listen."""
        self._kernel.control_handlers[wire.STATUS_REQUEST] = self._status_asked
        self._kernel.control_handlers[wire.ACTION_REQUEST] = self._action_asked
        self._kernel.comm_manager.register_target(wire.COMM_TARGET, self._page_opened)
        edits.current_cell = self._cell

    def close(self) -> None:
        """Listen no more."""
        self._kernel.control_handlers.pop(wire.STATUS_REQUEST, None)
        self._kernel.control_handlers.pop(wire.ACTION_REQUEST, None)
        with contextlib.suppress(KeyError):
            self._kernel.comm_manager.unregister_target(wire.COMM_TARGET, self._page_opened)
        edits.current_cell = edits.Cell
        self._closed.set()
        self._stir.set()
        for page in list(self._pages.values()):
            page.comm.close()
        self._pages.clear()

    def status(self, *, saves: bool = False) -> wire.PanelStatus:
        """What the panel is told."""
        return self._snapshots.take(self._actions.latest(), saves=saves)

    # -- the control channel -------------------------------------------------------------------

    async def _status_asked(self, stream: Any, ident: Any, parent: Any) -> None:
        content = asdict(self.status(saves=bool(parent["content"].get(wire.SAVES))))
        self._kernel.session.send(stream, wire.STATUS_REPLY, content, parent, ident)

    async def _action_asked(self, stream: Any, ident: Any, parent: Any) -> None:
        content = parent["content"]
        asking = content.get(wire.ACTION) in (wire.FORECAST, wire.CHECK)
        if asking:
            # They read sources and count tokens; an interrupt comes over this channel too, and need not wait.
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(None, self._actions.take, content)
        else:
            answer = self._actions.take(content)
        self._kernel.session.send(stream, wire.ACTION_REPLY, answer, parent, ident)
        if not asking:  # which changes nothing
            self._stir.set()

    # -- the comm ------------------------------------------------------------------------------

    def _page_opened(self, comm: Any, message: Any) -> None:
        page = _Page(comm)
        comm.on_msg(lambda said: self._heard(page, said["content"]["data"]))
        comm.on_close(lambda _: self._pages.pop(comm.comm_id, None))
        with self._lock:
            self._pages[comm.comm_id] = page
            if self._pusher is None or not self._pusher.is_alive():
                self._pusher = threading.Thread(target=self._push, daemon=True, name="nnsight-lab-panel")
                self._pusher.start()
        self._heard(page, message["content"]["data"])

    def _heard(self, page: _Page, data: Mapping[str, Any]) -> None:
        page.visible = bool(data.get(wire.VISIBLE, page.visible))
        page.saves = bool(data.get(wire.SAVES, page.saves))
        page.saves_told_at = 0.0
        every_s = data.get(wire.EVERY_S)
        if isinstance(every_s, int | float):
            page.every_s = max(_LEAST_S, float(every_s))
        page.told = None
        self._stir.set()

    def _push(self) -> None:
        while not self._closed.is_set():
            looking = [page for page in list(self._pages.values()) if page.visible]
            # Nobody looks: sleep until somebody does.
            self._stir.wait(_TICK_S if looking else None)
            self._stir.clear()
            if not looking or self._closed.is_set():
                continue
            now, changes = time.monotonic(), self._snapshots.saves_changes()
            saves = [page for page in looking if page.wants_saves(changes, now)]
            status = self._snapshots.take(self._actions.latest(), saves=bool(saves))
            content = asdict(status)
            key = _without_clocks(status)
            for page in saves:
                page.saves_told, page.saves_told_at = changes, now
            for page in looking:
                if page in saves or page.told != key or now - page.told_at >= page.every_s:
                    page.told, page.told_at = key, now
                    with contextlib.suppress(Exception):  # a page that is just going
                        page.comm.send(content)

    # -- cells ---------------------------------------------------------------------------------

    def _cell(self) -> edits.Cell:
        """The cell that is being run, as the front end named it."""
        try:
            parent = self._kernel.get_parent("shell")
        except Exception:  # ipykernel's own, and no reason for an edit to fail
            return edits.Cell()
        metadata, content = parent.get("metadata") or {}, parent.get("content") or {}
        return edits.Cell(str(metadata.get("cellId") or ""), str(content.get("code") or ""))


class _Page:
    """One page that opened a comm."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.visible = True
        self.saves = False
        self.every_s = _LEAST_S
        self.told: object = None
        self.told_at = 0.0
        self.saves_told: object = None
        self.saves_told_at = 0.0

    def wants_saves(self, changes: object, now: float) -> bool:
        """Whether to look the saves up for it: hundreds of labels, so only new ones, and not all the time."""
        first = self.saves_told_at == 0.0
        due = self.saves_told != changes and now - self.saves_told_at >= _LEAST_S
        return self.saves and (first or due)


def _without_clocks(status: wire.PanelStatus) -> wire.PanelStatus:
    """A status without what changes by itself."""
    engines = [
        replace(engine, up_s=0.0, idle_s=0.0, memory_bytes=0, phase_s=float(int(engine.phase_s)))
        for engine in status.engines
    ]
    importing_s = float(int(status.importing_s))
    return replace(
        status, engines=engines, orphans=[], devices=[], importing_s=importing_s, with_saves=False, saves=[]
    )


def load_panel(shell: Any) -> None:
    """Open the doors of a shell that is a kernel's; a terminal has none. A second call does nothing."""
    if getattr(shell, "kernel", None) is None or getattr(shell, _ATTRIBUTE, None) is not None:
        return
    control = Control(shell)
    control.open()
    setattr(shell, _ATTRIBUTE, control)


def unload_panel(shell: Any) -> None:
    """Close them."""
    control: Control | None = getattr(shell, _ATTRIBUTE, None)
    if control is not None:
        setattr(shell, _ATTRIBUTE, None)
        control.close()

"""A few questions over HTTP, authenticated as every question to a Jupyter server is.

Who is let in may run kernels as this user, so knows and may end no more here than there. A question is
answered on a thread: looking at every process of a machine takes milliseconds, a GPU's driver seconds. What a
page names is compared with what is found, and never becomes a path, a pid or a signal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from nnsight_lab.errors import LabError
from nnsight_lab.jupyter_server.machine import Machine
from nnsight_lab.wire import machine as wire


class _Handler(APIHandler):
    """What they share."""

    #: For a server's own rules of who may what.
    auth_resource = "nnsight-lab"

    def initialize(self, machine: Machine) -> None:
        self.machine = machine

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Cache-Control", "no-store")

    async def answered(self, work: Callable[[str], str], engine: str) -> None:
        try:
            answer, status = wire.MachineAnswer(True, await asyncio.to_thread(work, engine)), 200
        except LookupError as error:
            answer, status = wire.MachineAnswer(False, str(error.args[0])), 404
        except LabError as error:
            answer, status = wire.MachineAnswer(False, str(error)), 409
        self.set_status(status)
        self.finish(json.dumps(asdict(answer)))


class StatusHandler(_Handler):
    """Everything."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """A `MachineStatus`."""
        kernels = _kernels(self.kernel_manager)
        self.finish(json.dumps(asdict(await asyncio.to_thread(self.machine.status, kernels))))


class LogHandler(_Handler):
    """The end of a log."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """A `MachineAnswer`; the path is the one that the engine's own processes carry."""
        await self.answered(self.machine.log, self.get_query_argument(wire.ENGINE, ""))


class EndHandler(_Handler):
    """The end of an orphan."""

    @web.authenticated
    @authorized
    async def post(self, engine: str) -> None:
        """A `MachineAnswer`, once the processes are gone."""
        await self.answered(self.machine.end, engine)


class KeptEndHandler(_Handler):
    """The end of a kept engine."""

    @web.authenticated
    @authorized
    async def post(self, engine: str) -> None:
        """A `MachineAnswer`, once the processes are gone."""
        await self.answered(self.machine.end_kept, engine)


def routes(base_url: str) -> list[tuple[str, type[APIHandler], dict[str, Any]]]:
    """For tornado, below the server's base address."""
    root, given = f"{base_url.rstrip('/')}/{wire.ROUTE}", {"machine": Machine()}
    return [
        (f"{root}/{wire.STATUS}", StatusHandler, given),
        (f"{root}/{wire.LOG}", LogHandler, given),
        (f"{root}/{wire.ORPHANS}/([^/]+)/{wire.END}", EndHandler, given),
        (f"{root}/{wire.KEPT}/([^/]+)/{wire.END}", KeptEndHandler, given),
    ]


def _kernels(manager: Any) -> dict[int, str]:
    """The ids of this server's kernels by their pids; those that run elsewhere have none here."""
    found = {}
    for kernel_id in manager.list_kernel_ids():
        try:
            pid = getattr(manager.get_kernel(kernel_id).provisioner, "pid", None)
        except KeyError:  # it went meanwhile
            continue
        if isinstance(pid, int):
            found[pid] = str(kernel_id)
    return found

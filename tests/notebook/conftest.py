"""One kernel with one engine at a time, shared by the tests of an ipykernel version.

Tests that end the kernel or its engine need not mend it: the next one gets a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nnsight_lab.engine.processes import engine_processes
from tests.notebook.kernels import Kernel

#: The newest first: it has the longest list of tests, and pytest groups the tests by these.
VERSIONS = ["7.4", "7.3", "6.31"]


class Kernels:
    """The one kernel that is alive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kernel: Kernel | None = None
        self._pids: list[int] = []

    def of(self, version: str) -> Kernel:
        """A kernel of that version whose engine runs: the one that is there, or a fresh one."""
        kernel = self._kernel
        if kernel is not None and (kernel.version != version or not kernel.alive):
            self.close()
            kernel = None
        if kernel is None:
            kernel = self._kernel = Kernel(version, self._folder)
            self._pids.append(kernel.pid)
        ready = (
            "globals().get('lab') is not None and 'main' in lab.engines() and lab.get_engine('main').alive"
        )
        if kernel.started is None or not kernel.value(ready):
            kernel.start_engine()
        kernel.good("%edits clear --all")
        return kernel

    def close(self) -> None:
        """Ends the kernel that is alive."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()

    def leaked(self) -> list[int]:
        """Engine processes of kernels that were here."""
        owners = tuple(f"{pid}:" for pid in self._pids)
        return [found.pid for found in engine_processes() if found.owner.startswith(owners)]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    kernels = Kernels(tmp_path_factory.mktemp("kernels"))
    yield kernels
    kernels.close()
    assert kernels.leaked() == []


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernel(version: str, kernels: Kernels) -> Iterator[Kernel]:
    """A kernel of each version, with the engine `main` and no edits on it."""
    kernel = kernels.of(version)
    yield kernel
    if kernel.alive and kernel.engine_processes():
        assert kernel.value("engine.status().running if engine.alive else 0") == 0

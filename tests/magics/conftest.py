"""A shell with the extension, and a fake engine behind the package's front door."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import nnsight_lab
from tests.magics import fakes


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> fakes.Lab:
    fake = fakes.Lab()
    for name in fakes.DOORS:
        monkeypatch.setitem(vars(nnsight_lab), name, getattr(fake, name))
    monkeypatch.setattr(fakes.Block, "kinds", [])
    return fake


@pytest.fixture
def bare_shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    shell.user_ns["save"] = fakes.save
    hooks = (sys.excepthook, sys.displayhook)
    yield shell
    sys.excepthook, sys.displayhook = hooks
    # Not run here: without a history there is nothing to end, and its garbage collection is half a second.
    atexit.unregister(shell.atexit_operations)
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(bare_shell: Any, lab: fakes.Lab) -> Iterator[Any]:
    from nnsight_lab.magics.extension import load_ipython_extension, unload_ipython_extension

    load_ipython_extension(bare_shell)
    yield bare_shell
    unload_ipython_extension(bare_shell)


class Ran:
    """What a cell did."""

    def __init__(self, result: Any, out: str, err: str) -> None:
        self.error: BaseException | None = result.error_before_exec or result.error_in_exec
        self.out, self.err = out, err

    @property
    def lines(self) -> list[str]:
        return self.out.strip().splitlines()


@pytest.fixture
def run(shell: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def run_cell(cell: str) -> Ran:
        capsys.readouterr()
        result = shell.run_cell(cell, store_history=True)
        out, err = capsys.readouterr()
        return Ran(result, out, err)

    return run_cell

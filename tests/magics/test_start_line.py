"""A start in plain Python shows its phases to a person who watches, and nothing to a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.magics import fakes

#: Started as a user starts it, up to the door behind which vLLM is.
SCRIPT = """
import sys
import nnsight_lab as lab
from nnsight_lab.engine import importing
from tests.magics import fakes

importing.load = lambda progress=None: 0.0
behind = fakes.Lab()
lab._manager = lambda: behind
behind.engine = lambda name: behind.get_engine(name)
lab.start("demo", progress=eval(sys.argv[1]))
lab.start("demo", progress=eval(sys.argv[1]))
lab.restart(progress=eval(sys.argv[1]))
"""
READY = re.compile(r"engine main: demo ready in [\d.]+ s \(sync, CPU\)")


def piped(progress: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, progress], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stderr == ""
    return ran.stdout


def on_a_terminal(progress: str) -> str:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, progress], stdout=theirs, stderr=theirs, stdin=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait(60) == 0, shown
    os.close(ours)
    return shown.decode()


def test_a_pipe_gets_nothing_unless_it_is_asked_for() -> None:
    assert piped("None") == ""
    assert piped("False") == ""
    first, second, third = piped("True").splitlines()
    assert READY.fullmatch(first)
    assert second == "engine main: demo already running with this configuration (up 12 min 0 s)"
    assert READY.fullmatch(third)


def test_a_terminal_gets_one_line_that_moves_and_then_what_came_of_it() -> None:
    shown = on_a_terminal("None")
    assert "\rengine main: demo … reading weights (0 s in all)" in shown
    assert "\rengine main: demo … warming up (2 s in all)" in shown
    assert READY.search(shown)
    assert on_a_terminal("False") == ""


def test_a_function_is_told_and_nothing_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import nnsight_lab as lab
    from nnsight_lab.engine import importing

    behind, phases = fakes.Lab(), []
    monkeypatch.setattr(importing, "load", lambda progress=None: 0.0)
    monkeypatch.setattr(lab, "_manager", lambda: behind)

    def told(state: Any) -> None:
        phases.append(state.phase)

    lab.start("demo", progress=told)
    assert phases == ["reading weights", "warming up"]
    assert capsys.readouterr().out == ""

"""Ends: of the engine's process, of the kernel's, of the extension."""

from __future__ import annotations

import os
import signal

import pytest

from tests.notebook.kernels import Kernel, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

newest = pytest.mark.parametrize("version", ["7.4"], indirect=True)

LONG = "'Once upon a time', max_tokens=1000, ignore_eos=True"
WATCH = "watch=lambda requests: requests[0].tokens > 3 and print('busy')"


@newest
def test_unloading_the_extension_takes_everything_out(kernel: Kernel) -> None:
    hooks = (
        "(len(get_ipython().input_transformers_cleanup), len(get_ipython().Completer.custom_matchers), "
        "'engine' in get_ipython().magics_manager.magics['line'], "
        "'trace' in get_ipython().magics_manager.magics['cell'], '__lab__' in globals())"
    )
    loaded = kernel.value(hooks)
    assert loaded[2:] == (True, True, True)
    try:
        kernel.good("%unload_ext nnsight_lab")
        assert kernel.value(hooks) == (loaded[0] - 2, loaded[1] - 2, False, False, False)
        assert "Cell magic `%%trace` not found" in kernel.run("%%trace 'One'\npass\n").stderr
    finally:
        kernel.good("%load_ext nnsight_lab")
    assert kernel.value(hooks) == loaded


@newest
def test_an_engine_that_is_killed_is_one_line_and_comes_back_with_its_edits(kernel: Kernel) -> None:
    kernel.good("%%edit probe\nhidden = model.model.layers[5].output[0].save()\n")
    core = min(kernel.engine_processes(), key=lambda process: process.pid)
    running = kernel.submit(f"engine.generate({LONG}, {WATCH})")
    running.until(lambda message: message["msg_type"] == "stream")
    os.kill(core.pid, signal.SIGKILL)
    running.until(lambda message: message["msg_type"] == "error", limit_s=3)
    error = running.finish().error
    assert "\n" not in error
    assert error.startswith("EngineDied: Engine 'main' died: ")
    assert "%engine restart" in error
    for cell in ("%%trace 'One'\npass\n", "engine.generate('One')", "await engine.agenerate('One')"):
        again = kernel.run(cell)
        assert again.error.startswith("EngineDied: ")
        assert again.elapsed_s < 3
    assert "main: dead" in kernel.good("%engine status").texts[0]
    (line,) = kernel.good("%engine restart").texts
    assert line.startswith("engine main: demo ready in ")
    saved = "tuple(lab.generate('One, two,', max_tokens=1)[0].saves['hidden'].shape)"
    assert kernel.value(saved) == (4, 576)


@newest
def test_stopping_says_what_is_gone(kernel: Kernel) -> None:
    pids = [process.pid for process in kernel.engine_processes()]
    (line,) = kernel.good("%engine stop").texts
    assert line.startswith("Engine 'main' stopped in ")
    assert f"{len(pids)} processes gone" in line
    assert kernel.engine_processes() == []
    kernel.start_engine()  # the next test's


@newest
def test_an_engine_does_not_outlive_its_kernel(kernel: Kernel) -> None:
    assert kernel.engine_processes()
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until(lambda: not kernel.engine_processes(), 10, "engine processes outlive a killed kernel")

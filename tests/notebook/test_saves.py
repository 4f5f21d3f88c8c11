"""Saves in real kernels: kept, written, and found by the next kernel without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

newest = pytest.mark.parametrize("version", ["7.4"], indirect=True)

CELL = """%%trace "The Eiffel Tower is in the city of", max_tokens=2, temperature=0
hidden = model.model.layers[5].output[0].save()
"""


@newest
def test_the_next_kernel_finds_what_this_one_wrote(kernel: Kernel, tmp_path: Path) -> None:
    state = f"import os; os.environ['XDG_STATE_HOME'] = {str(tmp_path / 'state')!r}"
    kernel.good(f"{state}\nengine.saves.clear()")
    kernel.good(CELL)
    assert kernel.value("engine.saves.ids() == [tracer.output.request_id]")
    (shown,) = kernel.good("%saves").texts
    assert "layers" not in shown
    assert "hidden" in shown
    assert "The Eiffel Tower is in the city of" in shown
    forms = kernel.good("%saves").shown[0]
    assert "hidden" in forms["text/plain"]
    assert "<table" in forms["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in forms
    assert "widget" not in " ".join(kernel.good("%saves table").shown[0])
    assert kernel.complete("%saves dr|") == ["drop"]
    (said,) = kernel.good(f"%saves write {tmp_path / 'first'}").texts
    assert said == f"Wrote 1 request to {tmp_path / 'first.safetensors'}"
    total = kernel.value("float(hidden.sum())")
    request_id = kernel.value("tracer.output.request_id")
    kernel.good("del os.environ['XDG_STATE_HOME']")

    after = Kernel("7.4", tmp_path)
    try:
        after.good(f"{state}\n%load_ext nnsight_lab")
        (listed,) = after.good("%saves").texts
        assert "first.safetensors" in listed
        after.good(f"f = %saves read {tmp_path / 'first'}")
        assert after.value("f.requests") == (request_id,)
        assert after.value("float(f['hidden'].sum())") == pytest.approx(total, rel=1e-6)
        assert after.value("f.labels[0].module_path") == "model.layers[5].output[0]"
        assert after.value("__import__('nnsight_lab').engines()") == {}
        refused = after.run("%saves read nowhere")
        assert refused.error.count("\n") == 0
        assert "FileRefused" in refused.error
    finally:
        after.close()


@newest
def test_memory_returns_when_the_notebook_and_the_store_let_go(kernel: Kernel) -> None:
    kernel.good("engine.saves.clear()")
    kernel.good(
        "import gc\ngc.collect()\nengine._driver.home.flush()\nbefore = sum(engine.rpc('lab_used_bytes'))"
    )
    kernel.good(CELL.replace(".save()", ".repeat(100, 10).save()"))
    assert kernel.value("sum(engine.rpc('lab_used_bytes')) > before")
    kernel.good("del hidden, tracer\n%saves drop all")
    kernel.good(
        "import time\ngc.collect()\nend = time.monotonic() + 1\n"
        "while sum(engine.rpc('lab_used_bytes')) > before:\n    assert time.monotonic() < end"
    )

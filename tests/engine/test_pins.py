"""Private names of nnsight and vLLM: all there, and loud when one is not."""

from __future__ import annotations

import pytest

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab import pins
from nnsight_lab.errors import UpstreamChanged

ALL = [*pins.CLIENT, *pins.WORKER, *pins.CPU_WORKER, *pins.SCHEDULER]


@pytest.mark.parametrize("pin", ALL, ids=lambda pin: f"{pin.module}.{pin.name}")
def test_every_pin_is_there(pin):
    pin.check()
    assert pin.reason


def test_no_name_is_pinned_twice_in_one_process():
    for listed in (pins.CLIENT, pins.WORKER + pins.CPU_WORKER, pins.SCHEDULER):
        names = [(pin.module, pin.name) for pin in listed]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (pins.Pin("nnsight.no_such_module", "Name", "of the test"), "not found"),
        (pins.Pin("nnsight.tracing.tracer", "NoSuchName", "of the test"), "not found"),
        (pins.Pin("nnsight.tracing.tracer", "Tracer.no_such_method", "of the test"), "not found"),
        (
            pins.Pin("nnsight.tracing.tracer", "skip_context", "of the test", ("gone",)),
            "parameter 'gone' is gone",
        ),
    ],
)
def test_a_missing_pin_names_itself_its_reason_and_the_versions(pin, said):
    with pytest.raises(UpstreamChanged, match=said) as raised:
        pins.check((pin,))
    error = raised.value
    assert error.name == f"{pin.module}.{pin.name}"
    assert error.name in str(error)
    assert "needed because of the test" in str(error)
    assert f"nnsight {pins.version_of('nnsight')}" in str(error)
    assert f"vLLM {pins.vllm_version()}" in str(error)
    assert len(str(error).splitlines()) == 1


def test_a_start_stops_at_a_missing_pin(one_engine, llama_path, monkeypatch):
    import nnsight_lab as lab
    from tests.waiting import owned

    one_engine.stop()
    gone = pins.Pin("nnsight.tracing.tracer", "NoSuchName", "of the test")
    monkeypatch.setattr(pins, "CLIENT", (gone,))
    with pytest.raises(UpstreamChanged, match=r"nnsight\.tracing\.tracer\.NoSuchName"):
        lab.start(str(llama_path), mode="sync")
    assert owned() == []
    assert lab.engines() == {}

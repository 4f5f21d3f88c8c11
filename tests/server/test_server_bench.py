"""The measurement of a shared engine: its parts measure, on a server that is there."""

from __future__ import annotations

import contextlib

import pytest

from nnsight_lab.bench import server as bench
from nnsight_lab.engine.remote import RemoteEngine
from tests.server.conftest import TOKENS
from tests.waiting import until

pytestmark = pytest.mark.engine


def test_the_parts_of_the_measurement_measure_and_leave_nothing(server):
    token = TOKENS["alice"]
    with contextlib.ExitStack() as stack:
        both = {"plain": (server.url, TOKENS["bob"]), "ours": (server.url, token)}
        seen = bench.openai_side(stack, both, 3, 2, 2)
        assert 0 < seen.ratio("ours", "plain") < 100
        engines = {}
        for name in ("fetched", "mapped"):
            engines[name] = RemoteEngine(name, server.url, token, same_host=name == "mapped")
            engines[name].start()
            stack.callback(engines[name].stop)
        bench._trace(engines["mapped"])
        found = bench.roads(engines, 5_000_000, 2)
        assert all(figure > 0 for figure in found.values())
        assert engines["mapped"]._driver.home.opened_bytes >= 4 * 5_000_000
        assert engines["fetched"]._driver.home.opened_bytes == 0
        assert engines["fetched"]._driver.home_s > 0
    assert 0 < bench.attached(server.url, token) < 120
    until(lambda: server.figures()["leases"] == 0, 30, "no lease")
    assert server.figures()["lent"] == server.figures()["parked"] == 0

"""The measurement of widgets: it measures, and its bytes are those of tiles and not of tensors."""

from __future__ import annotations

import pytest

from nnsight_lab.bench.widgets import measure
from nnsight_lab.widgets.base import STATIC


@pytest.mark.browser
@pytest.mark.skipif(
    not (STATIC / "heatmap.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)
def test_a_small_measurement_has_every_figure(chromium: str) -> None:
    found = measure(rows=3000, columns=2000, pans=40)
    assert found["tensor_bytes"] == 3000 * 2000 * 4
    assert 0 < found["bytes_to_browser"] < found["tensor_bytes"]
    assert 0 < found["tile_ms"] <= found["worst_tile_ms"]
    assert 0 < found["median_frame_ms"] <= found["worst_frame_ms"]
    assert found["esm_gzip_bytes"] <= 60_000
    assert 0 < found["browser_first_paint_ms"] <= found["worst_browser_first_paint_ms"]

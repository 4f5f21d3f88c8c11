"""What looking at a large tensor costs, in a real JupyterLab in a real headless browser.

A tile's time is measured in the page, from the frame in which a piece of the picture was missing to the one
that has it: the question, the kernel's reading and the drawing are all in it. Frames are those of a pan by
keys, as a person holding an arrow key makes them. A headless browser draws without a GPU, so a person's
frames are shorter. The overview is done when every value was read for its means; the first picture, of some
values, comes before. Beside the worst frame stands the worst of as many in which nothing happened: what the
machine was doing besides. A browser of saves is timed from the start of its cell, over a store that is full.
"""

from __future__ import annotations

import gzip
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nnsight_lab import pins
from nnsight_lab.bench.jupyterlab import Notebook, empty_notebook, find_chromium, open_page, serve, wait_until
from nnsight_lab.errors import WidgetError
from nnsight_lab.widgets.base import STATIC

#: Presses a key `presses` times; frames between them, and how long each missing piece was missing.
_PAN: Final = """
async ([presses, keys]) => {
  const root = document.querySelector('.nnl-heatmap');
  const canvas = root.querySelector('canvas.nnl-canvas');
  const frame = () => new Promise(requestAnimationFrame);
  const tiles = [];
  let busySince = null;
  const observer = new MutationObserver(() => {
    if (root.dataset.state === 'busy') {
      busySince ??= performance.now();
    } else if (busySince !== null) {
      tiles.push(performance.now() - busySince);
      busySince = null;
    }
  });
  observer.observe(root, { attributes: true, attributeFilter: ['data-state'] });
  const frames = [];
  await frame();
  let last = performance.now();
  for (let press = 0; press < presses; press++) {
    const key = keys[press % keys.length];
    canvas.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
    for (let count = 0; count < 6; count++) {
      await frame();
      const now = performance.now();
      frames.push(now - last);
      last = now;
    }
  }
  const limit = performance.now() + 10000;
  while (root.dataset.state !== 'done' && performance.now() < limit) {
    await frame();
  }
  await frame();
  observer.disconnect();
  return { frames, tiles };
}
"""

#: Runs the cell that was just written; how long until one browser more is on the page, and until it has rows.
_BROWSE: Final = """
async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const rows = () => document.querySelectorAll('.nnl-browser [data-place="0"]').length;
  const views = () => document.querySelectorAll('.nnl-browser').length;
  const [before, there] = [rows(), views()];
  let made = null;
  const began = performance.now();
  jupyterapp.commands.execute('notebook:run-cell');
  while (rows() === before && performance.now() - began < 30000) {
    await frame();
    made ??= views() > there ? performance.now() - began : null;
  }
  await frame();
  const took = performance.now() - began;
  return rows() === before ? null : [made ?? took, took];
}
"""
_REQUESTS: Final = 1000
_NAMES: Final = 30
_LOOKS: Final = 5


def measure(
    *,
    rows: int = 50_000,
    columns: int = 4_096,
    pans: int = 60,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Draw a random tensor ``[rows, columns]``, zoom into it, and pan.

    Args:
        rows: Of the tensor.
        columns: Of the tensor.
        pans: How many key presses.
        dtype: Of the tensor, as torch names it.
        say: Told what is going on.

    Returns:
        Milliseconds and bytes.

    Raises:
        WidgetError: There is no browser, or nothing was drawn.
    """
    browser = find_chromium()
    if browser is None:
        raise WidgetError("no chromium here: scripts/setup.sh browser")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = empty_notebook(folder / "bench.ipynb")
        say("starting JupyterLab and the browser")
        with serve(folder, path) as server, open_page(server, path.name, browser) as page:
            return {
                **_measure(Notebook(page), rows, columns, pans, dtype, say),
                **_measure_browser(Notebook(page), say),
                "esm_gzip_bytes": len(gzip.compress((STATIC / "heatmap.js").read_bytes())),
                "versions": {
                    name: pins.version_of(name) for name in ("jupyterlab", "ipykernel", "anywidget")
                },
            }


def _measure(
    notebook: Notebook, rows: int, columns: int, pans: int, dtype: str, say: Callable[[str], None]
) -> dict[str, Any]:
    page = notebook.page
    notebook.finish(60)
    say(f"making {rows:,} x {columns:,} of {dtype}")
    notebook.run(
        "import torch\nfrom nnsight_lab.widgets import Heatmap\n"
        f"tensor = torch.empty({rows}, {columns}, dtype=torch.{dtype})\n"
        "for part in tensor.split(1000):\n    part.copy_(torch.randn(part.shape))\n"
        "heatmap = Heatmap(tensor)\nprint('made')"
    )
    page.wait_for_selector(".jp-OutputArea-output:has-text('made')", timeout=300_000)
    say("drawing it")
    notebook.run("heatmap")
    root = page.locator(".nnl-heatmap")
    root.wait_for(timeout=60_000)

    def data(name: str) -> str:
        return str(root.evaluate(f"element => element.dataset.{name} ?? ''"))

    def done() -> float:
        wait_until(lambda: data("state") in ("done", "failed"), 120, "the picture", tick_s=0.02)
        if data("state") == "failed":
            raise WidgetError(f"nothing was drawn: {root.locator('.nnl-error').inner_text()}")
        return float(data("tookMs"))

    overview_ms = done()
    first_ms = float(data("firstMs"))
    canvas = root.locator("canvas.nnl-canvas")
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    say("zooming")
    zooms = []
    for _ in range(30):
        page.keyboard.press("+")
        # The next two frames say whether anything is missing.
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        zooms.append(done())
        if re.search("Every value", root.locator(".nnl-words").first.inner_text()):
            break
    say("panning")
    nothing = page.evaluate(_PAN, [pans, ["Shift"]])["frames"]
    keys = ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown"]
    seen = page.evaluate(_PAN, [pans, keys])
    tiles = seen["tiles"]
    if not tiles:
        raise WidgetError("no pan needed a tile: pan further")
    return {
        "tile_ms": round(statistics.median(tiles), 1),
        "worst_tile_ms": round(max(tiles), 1),
        "worst_frame_ms": round(max(seen["frames"]), 1),
        "worst_frame_without_pans_ms": round(max(nothing), 1),
        "median_frame_ms": round(statistics.median(seen["frames"]), 1),
        "first_picture_ms": round(first_ms, 1),
        "overview_ms": round(overview_ms, 1),
        "zoom_ms": round(statistics.median(zooms), 1),
        "worst_zoom_ms": round(max(zooms), 1),
        "bytes_to_browser": int(data("bytes")),
        "tensor_bytes": _bytes(rows * columns, dtype),
        "tiles": len(tiles),
        "pans": pans,
        "shape": [rows, columns],
        "dtype": dtype,
    }


def _measure_browser(notebook: Notebook, say: Callable[[str], None]) -> dict[str, Any]:
    """How long the first rows of a store take, from the start of the cell."""
    say(f"browsing {_REQUESTS:,} requests of {_NAMES} saves")
    notebook.run(
        "from nnsight_lab.saves.store import SavesStore\nfrom nnsight_lab.widgets import SavesBrowser\n"
        f"store = SavesStore()\nfor number in range({_REQUESTS}):\n"
        f"    values = {{f'name{{n}}': torch.zeros(4, 8) for n in range({_NAMES})}}\n"
        "    _ = store.put(f'request-{number}', [{'trace': values}], {'prompt': f'Prompt {number}'})\n"
        "print('stored')"
    )
    notebook.page.wait_for_selector(".jp-OutputArea-output:has-text('stored')", timeout=120_000)
    made, found = [], []
    for _ in range(_LOOKS):
        notebook.finish(30)
        notebook.write("SavesBrowser(store)")
        took_ms = notebook.page.evaluate(_BROWSE)
        if took_ms is None:
            raise WidgetError("the browser of saves showed no rows")
        made.append(took_ms[0])
        found.append(took_ms[1])
    return {
        "browser_first_paint_ms": round(statistics.median(found), 1),
        "worst_browser_first_paint_ms": round(max(found), 1),
        # JupyterLab's own part: the cell's way to the kernel, the comm, and the module it makes of the text.
        "browser_view_made_ms": round(statistics.median(made), 1),
        "browser_rows": _REQUESTS * _NAMES,
    }


def _bytes(count: int, dtype: str) -> int:
    # Local: torch, for the width of a dtype alone.
    import torch

    width: int = getattr(torch, dtype).itemsize
    return count * width

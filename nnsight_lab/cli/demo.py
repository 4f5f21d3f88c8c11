"""``nnsight-lab demo``: the quickstart notebook, run cell by cell in a real kernel, without a browser.

What a cell prints is printed here while it runs. A cell that fails ends the demo with that cell's one line;
a cell that is silent for minutes is not an error, since an engine's first start is.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nnsight_lab.cli.terminal import paint
from nnsight_lab.errors import PlainError

#: A cell that runs longer has hung: an engine's first start on two CPU cores takes about one minute.
CELL_TIMEOUT_S = 900
QUICKSTART = "00_quickstart.ipynb"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def add_parser(sub: Any) -> None:
    parser: argparse.ArgumentParser = sub.add_parser(
        "demo",
        help="run the quickstart notebook here in the terminal",
        description="Make the demo model if need be, run a notebook in a kernel of its own, print what its "
        "cells print, and end with `demo: ok`.",
    )
    parser.add_argument(
        "notebook",
        nargs="?",
        type=Path,
        metavar="NOTEBOOK",
        help=f"default: the clone's notebooks/{QUICKSTART}",
    )
    parser.add_argument("--no-model", action="store_true", help="do not make the demo model first")
    parser.set_defaults(run=lambda arguments: run(arguments.notebook, make_model=not arguments.no_model))


def run(notebook: Path | None = None, *, make_model: bool = True) -> int:
    """Run ``notebook`` and print as it goes.

    Args:
        notebook: The quickstart by default.
        make_model: Make the demo model first, where it is missing.

    Returns:
        0, or 1 when a cell failed.

    Raises:
        PlainError: There is no such notebook.
    """
    path = notebook or Path(__file__).resolve().parents[2] / "notebooks" / QUICKSTART
    if not path.is_file():
        where = "name one" if notebook else "run this in a clone of the repository, or name a notebook"
        raise PlainError(f"there is no notebook at {path}: {where}")
    started = time.monotonic()
    if make_model:
        # Local, as below: `nnsight-lab --help` must not wait for these.
        from nnsight_lab.engine.demo import demo_model

        print(paint(f"demo: model at {demo_model(lambda line: _say(f'demo: {line}'))}", "dim"))
    failure = _execute(path)
    took = time.monotonic() - started
    if failure:
        print(f"demo: failed after {took:.0f} s: {failure}", file=sys.stderr)
        return 1
    print(f"demo: every cell of {path.name} ran ({took:.0f} s)")
    print(paint("demo: ok", "green"))
    return 0


def _execute(path: Path) -> str | None:
    """Run every cell; returns the one line of the cell that failed, or None."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    shown = _Shown()

    class Printing(NotebookClient):  # type: ignore[misc,unused-ignore]  # here because its base is imported here
        """Prints outputs as they arrive."""

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            shown.message(msg)
            return super().process_message(msg, cell, cell_index)

    book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call,unused-ignore]
    code = [
        index for index, cell in enumerate(book.cells) if cell.cell_type == "code" and cell.source.strip()
    ]

    def begin(cell: Any, cell_index: int) -> None:
        if cell_index in code:
            _say(f"\n[{code.index(cell_index) + 1}/{len(code)}] {_title(cell.source)}")

    client = Printing(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=begin,
        on_cell_executed=lambda **_: shown.settle(),
    )
    # What the kernel's process itself writes (warnings of its start, of libraries in C) is no cell's output.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            client.execute(stderr=log)
        except CellExecutionError as error:
            return _one_line(f"{error.ename}: {error.evalue}")
        except CellTimeoutError:
            return f"a cell ran longer than {CELL_TIMEOUT_S} s"
        except DeadKernelError:
            log.seek(0)
            last = _one_line("\n".join(reversed(log.read().splitlines())), "nothing")
            return (
                f"the kernel died. Its last line: {last} (`nnsight-lab doctor` shows how much memory is free)"
            )
    return None


class _Shown:
    """Prints messages' text: what is printed and what a cell's last line is, not logs and not widgets.

    A display that is updated in place (an engine's start) is printed when it first appears and as it ended.
    """

    def __init__(self) -> None:
        self._updated: dict[str, str] = {}

    def message(self, msg: Any) -> None:
        content = msg["content"]
        if msg["msg_type"] == "stream" and content["name"] == "stdout":
            sys.stdout.write(_clean(content["text"]))
            sys.stdout.flush()
        elif msg["msg_type"] in ("execute_result", "display_data", "update_display_data"):
            data = content["data"]
            if "application/vnd.jupyter.widget-view+json" in data or "text/plain" not in data:
                return
            text = _clean(data["text/plain"]).rstrip("\n")
            if msg["msg_type"] == "update_display_data":
                self._updated[content.get("transient", {}).get("display_id", "")] = text
            else:
                print(text, flush=True)

    def settle(self) -> None:
        """The cell has ended, and with it its updates."""
        for text in self._updated.values():
            print(text, flush=True)
        self._updated.clear()


def _clean(text: str) -> str:
    # A notebook's outputs may move the cursor; a log file must not be full of that.
    return text if sys.stdout.isatty() else _ANSI.sub("", text)


def _title(source: str) -> str:
    line = next((line for line in source.splitlines() if line.strip()), "")
    return line if len(line) <= 90 else line[:89] + "…"


def _one_line(text: str, otherwise: str = "a cell failed without a message") -> str:
    lines = [line.strip() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    return lines[0] if lines else otherwise


def _say(line: str) -> None:
    print(paint(line, "bold"), flush=True)

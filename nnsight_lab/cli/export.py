"""``nnsight-lab export``: a notebook with magics becomes a plain Python script."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(sub: Any) -> None:
    parser: argparse.ArgumentParser = sub.add_parser(
        "export",
        help="turn a notebook into a plain Python script",
        description="Write a notebook's cells as a Python script: %%trace and %%edit cells become the `with` "
        "blocks they stand for, so that the script runs without Jupyter.",
    )
    parser.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="an .ipynb file")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="where to write (default: beside it, .py)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from nnsight_lab.magics.export import export_notebook  # brings IPython and nbformat

    written = export_notebook(arguments.notebook, arguments.out)
    print(written)
    return 0

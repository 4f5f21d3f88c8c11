"""What `pip install nnsight-lab` without extras installs, as an environment of its own: no vLLM is in it.

The packages are those that are installed here, linked into one folder: the project's own dependencies and
theirs, nothing else. A Python that is started without its site-packages and with that folder has no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import ROOT


def _dependencies() -> list[str]:
    """The project's, as `pyproject.toml` has them: the metadata of an editable install may be older."""
    tomllib = pytest.importorskip("tomllib")
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


def distributions() -> list[metadata.Distribution]:
    """The project's dependencies and theirs, without extras that nobody asked for."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    todo = [(Requirement(one), "") for one in _dependencies()]
    while todo:
        wanted, extra = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = wanted.name.lower().replace("_", "-")
        known = name in found
        found.setdefault(name, metadata.distribution(wanted.name))
        for more in [*(() if known else ("",)), *wanted.extras]:
            todo += [(Requirement(one), more) for one in found[name].requires or ()]
    return list(found.values())


def make(folder: Path) -> Path:
    """Link them into a folder."""
    for one in distributions():
        for file in one.files or ():
            top = file.parts[0]
            source = Path(str(one.locate_file(top)))
            if top not in ("..", "__pycache__") and source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    return folder


def run(packages: Path, program: str, environment: Mapping[str, str] = {}) -> str:
    """What a program prints there; it must end well."""
    variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env=variables,
        cwd=packages.parent,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout

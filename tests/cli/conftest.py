import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnsight_lab.engine.demo import demo_model


@pytest.fixture(scope="session")
def made_model() -> Path:
    """The real demo model, converted once and kept in the user's cache, as a user's is."""
    return demo_model(lambda line: print(f"demo model: {line}"))


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    """A cache directory of the test's own, for this process and those it starts."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "nnsight_lab"


@pytest.fixture(scope="session")
def command():
    """Runs ``nnsight-lab`` as a program; extra environment by keyword."""

    def run(*arguments: str, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nnsight_lab", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **environment},
            check=False,
        )

    return run

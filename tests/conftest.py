"""What every test may ask for: tiny models, one engine at a time, and a look for what was left behind."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A shell's background job ignores SIGINT, and so would its tests; the stop button is heard everywhere.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `tests` is a package of its own here and in the engine's processes, which inherit this path.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Engines that tests keep are not among the user's, nor among those of tests that run beside these.
os.environ["NNSIGHT_LAB_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="nnl-")
atexit.register(shutil.rmtree, os.environ["NNSIGHT_LAB_RUNTIME_DIR"], ignore_errors=True)

# A gibibyte holds half a million tokens of the tiny models; vLLM's own default is a share of the machine.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole, before any test imports nnsight)
from nnsight_lab.bench.jupyterlab import find_chromium
from nnsight_lab.engine import kept
from tests import models
from tests.waiting import OneEngine, idle, owned


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "one_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def no_kept_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kept engines of whoever runs the tests are none of theirs."""
    found = tmp_path_factory.mktemp("run")
    found.chmod(0o700)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(kept.FOLDER_ENV, str(found))
        yield


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gpt2(tmp_path_factory.mktemp("tiny") / "gpt2")


@pytest.fixture(scope="session")
def gemma2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_gemma2(tmp_path_factory.mktemp("tiny") / "gemma2")


@pytest.fixture(scope="session")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneEngine]:
    """Starts engines, and never has two of them alive; none is left when the session ends."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        holder = OneEngine()
        yield holder
        holder.stop()
        assert owned() == [], "engine processes outlived the tests"


@pytest.fixture(scope="module")
def nothing_left_behind(one_engine: OneEngine) -> Iterator[None]:
    """No process beyond the live engine's, no edit and no worker entry, before a module and after it."""
    _look(one_engine)
    yield
    _look(one_engine)


def _look(one_engine: OneEngine) -> None:
    engine = one_engine.live
    strangers = [process for process in owned() if engine is None or process.engine != engine.id]
    assert strangers == []
    if engine is not None:
        idle(engine)


@pytest.fixture(scope="session", params=["sync", "async"])
def mode(request: pytest.FixtureRequest) -> str:
    """The two kinds of engine; pytest runs all tests of one before it turns to the other."""
    return str(request.param)


@pytest.fixture
def engine(one_engine: OneEngine, mode: str, llama_path: Path, nothing_left_behind: None) -> Iterator[Any]:
    """A tiny Llama in float32, shared by the tests; each finds and leaves it without edits and requests."""
    live = one_engine.want(llama_path, mode, dtype="float32", max_model_len=models.CONTEXT)
    idle(live)
    yield live
    if live.alive:
        live.edits.clear()
        idle(live)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where the browser is."""
    pytest.importorskip("playwright.sync_api")
    found = find_chromium()
    if found is None:
        pytest.skip("no chromium here: scripts/setup.sh browser")
    return found

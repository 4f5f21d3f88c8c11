"""What an install brings: the JupyterLab and server extensions found and enabled, without node, and gone with the package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import psutil
import pytest

import nnsight_lab
from nnsight_lab.bench.jupyterlab import LABEXTENSION, SERVER_CONFIG

ROOT = Path(__file__).resolve().parents[2]
MAX_WHEEL_BYTES = 10**6

pytestmark = pytest.mark.skipif(
    not (LABEXTENSION / "install.json").exists() or not (ROOT / "hatch_build.py").exists(),
    reason="the JupyterLab extension is not built: scripts/setup.sh widgets",
)


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    answer = subprocess.run(
        words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and the wheel made of it, as `python -m build` makes them; node is out of reach."""
    folder = tmp_path_factory.mktemp("archives")
    program = f"""
import os, tarfile
from hatchling import build
sdist = build.build_sdist({str(folder)!r})
tarfile.open({str(folder)!r} + "/" + sdist).extractall({str(folder / "unpacked")!r}, filter="data")
os.chdir({str(folder / "unpacked")!r} + "/" + sdist.removesuffix(".tar.gz"))
build.build_wheel({str(folder)!r})
"""
    run(sys.executable, "-c", program, PATH="/nowhere")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_wheel_has_the_extension_once_and_stays_small(archives: tuple[Path, Path]) -> None:
    _, wheel = archives
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    entries = [name for name in names if re.search(r"remoteEntry\.\w+\.js$", name)]
    assert len(entries) == 1
    assert "/data/share/jupyter/labextensions/nnsight-lab/static/" in entries[0]
    assert [name for name in names if name.endswith((".map", ".orig"))] == []
    assert "nnsight_lab/widgets/static/heatmap.js" in names


def test_the_sdist_has_all_it_takes_to_build_the_typescript_again(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as files:
        names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    tracked = run("git", "ls-files", "labextension").split() if (ROOT / ".git").exists() else []
    assert set(tracked) <= names
    assert not any("node_modules" in name for name in names)


def test_an_install_is_enabled_and_ok_and_an_uninstall_leaves_nothing(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    before = {path for path in venv.rglob("*") if path.is_file()}
    run(*pip, "install", "--no-deps", "--no-index", archives[1], PATH="/nowhere")  # no node
    installed = {path for path in venv.rglob("*") if path.is_file()} - before
    assert [path for path in installed if path.name == "install.json"]
    listed = run(
        sys.executable,
        *("-m", "jupyter", "labextension", "list"),
        JUPYTER_PATH=str(venv / "share" / "jupyter"),
        JUPYTER_CONFIG_DIR=str(tmp_path / "config"),
    )
    line = next(line for line in listed.splitlines() if "nnsight-lab" in line)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert plain.split()[:4] == ["nnsight-lab", f"v{nnsight_lab.__version__}", "enabled", "OK"]
    assert str(venv) in listed
    listed = run(
        *(python, "-m", "jupyter_server", "extension", "list"),
        # The install under test, and beside it only what it depends on.
        PYTHONPATH=str(Path(psutil.__file__).parents[1]),
        JUPYTER_CONFIG_DIR=str(tmp_path / "config"),
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", listed)
    assert re.search(r"^ *nnsight_lab\.jupyter_server enabled$", plain, re.MULTILINE), plain
    assert re.search(rf"nnsight_lab\.jupyter_server {nnsight_lab.__version__} +OK", plain), plain
    assert str(venv / "etc" / "jupyter") in plain
    run(*pip, "uninstall", "--yes", "nnsight-lab")
    left = {path for path in venv.rglob("*") if path.is_file()} - before
    assert [path for path in left if path.suffix != ".pyc"] == []
    assert [path for path in venv.rglob("*") if re.search(r"nnsight[-_]lab", path.name)] == []
    assert [path for path in (venv / "etc").rglob("*") if path.is_file()] == []


def test_what_the_tests_enable_is_what_an_install_enables() -> None:
    shipped = ROOT / "jupyter-config" / "jupyter_server_config.d" / "nnsight-lab.json"
    assert json.loads(shipped.read_text()) == SERVER_CONFIG


def test_the_extension_has_the_packages_version() -> None:
    for path in (ROOT / "labextension" / "package.json", LABEXTENSION / "package.json"):
        assert json.loads(path.read_text())["version"] == nnsight_lab.__version__


def test_an_archive_of_a_development_build_is_refused(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in (
        "nnsight_lab/__init__.py",
        "nnsight_lab/widgets/static/heatmap.js",
        "nnsight_lab/labextension/install.json",
        "labextension/node_modules/.cache/nnsight-lab/development",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    build = (sys.executable, "-c", f"from hatchling import build; build.build_wheel({str(tmp_path)!r})")
    answer = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode != 0
    assert "development build: scripts/setup.sh widgets" in answer.stderr
    (tmp_path / "labextension/node_modules/.cache/nnsight-lab/development").unlink()
    run(*build, cwd=tmp_path)


def test_an_archive_without_the_browsers_part_is_refused(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "nnsight_lab").mkdir()
    (tmp_path / "nnsight_lab" / "__init__.py").touch()
    program = f"from hatchling import build; build.build_wheel({str(tmp_path)!r})"
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert answer.returncode != 0
    assert "scripts/setup.sh widgets" in answer.stderr

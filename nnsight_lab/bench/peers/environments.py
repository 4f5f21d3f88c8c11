"""Where each peer's packages are, and how they get there.

A peer's environment holds only its own packages, pinned in ``requirements.json``; torch, vLLM and
transformers are those of the environment this runs in, by a ``.pth`` file, so that a setup takes seconds
and every peer is measured on the same versions of them. Where this environment has exactly what a peer
needs, it is used as it is. What a peer asks for and does not get (vllm-lens wants one version of vLLM) is
told in its rows, not hidden.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil

from nnsight_lab.errors import BenchRefused, nearest

SETUP: Final = "nnsight-lab bench peers --setup"
_STAMP: Final = "peer.json"
_INSTALL_S: Final = 900


@dataclass(frozen=True)
class Peer:
    """Who is measured.

    Attributes:
        name: As in rows and on the command line.
        title: For people.
        runner: The module that runs it.
        plugins: What ``VLLM_PLUGINS`` lets vLLM load.
        words: Further words for the runner.
        requirements: Its packages; empty where it comes with ours.
        only_cuda: Why it is not run elsewhere; empty where it is.
        asks: What its pinned version asks for, and is not given here: the same vLLM and Python as the others.
    """

    name: str
    title: str
    runner: str
    plugins: str = ""
    words: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    only_cuda: str = ""
    asks: str = ""


def peers() -> dict[str, Peer]:
    """Every peer, in the order in which they run: HF has the values, plain vLLM the times of reference."""
    pinned = json.loads(Path(__file__).with_name("requirements.json").read_text(encoding="utf-8"))
    nnsight = tuple(pinned["nnsight"])
    found = (
        Peer("hf", "HF transformers + hooks", "hf"),
        Peer("plain", "plain vLLM", "plain"),
        Peer("nnsight-lab", "nnsight-lab", "ours", plugins="nnsight_lab"),
        Peer("nnsight", "nnsight alone", "nnsight_alone", requirements=nnsight),
        Peer(
            "nnsight-taps",
            "nnsight alone, taps",
            "nnsight_alone",
            words=("taps",),
            requirements=nnsight,
            only_cuda="taps are for CUDA graphs",
        ),
        Peer(
            "vllm-lens",
            "vllm-lens",
            "vllm_lens",
            plugins="activations",
            requirements=tuple(pinned["vllm-lens"]),
            asks="vLLM 0.30.0 and Python 3.12",
        ),
        Peer(
            "transformer-lens",
            "TransformerLens",
            "transformer_lens",
            requirements=tuple(pinned["transformer-lens"]),
        ),
    )
    return {peer.name: peer for peer in found}


def chosen(names: str | None) -> list[Peer]:
    """The peers named, ``a,b``; all where none are.

    Raises:
        BenchRefused: One is not known.
    """
    known = peers()
    if not names:
        return list(known.values())
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise BenchRefused(f"{name!r} is not a peer.{nearest(name, known)}")
    return [peer for name, peer in known.items() if name in asked]


class Environments:
    """The environments in a folder, one for each peer that needs one.

    Args:
        folder: Where they are; in the user's cache where it is None.
        packages: Peer -> a folder of its packages, as ``pip install --target`` makes it, instead.
    """

    def __init__(self, folder: Path | None = None, packages: Mapping[str, Path] | None = None) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = folder or Path(cache) / "nnsight_lab" / "peers"
        self.packages = dict(packages or {})

    def python(self, peer: Peer) -> Path | None:
        """The Python that runs a peer; None where its packages are not installed."""
        if peer.name in self.packages or _here(peer.requirements):
            return Path(sys.executable)
        if self._stamp(peer) != self._wanted(peer):
            return None
        return self._python(peer)

    def surroundings(self, peer: Peer, anchor: Path) -> dict[str, str]:
        """The environment variables of a peer's process.

        Args:
            peer: Whose.
            anchor: A folder in which this package, and nothing else, is found.
        """
        extra = {
            "VLLM_PLUGINS": peer.plugins,
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(_kv_cache_gib())),
            "TOKENIZERS_PARALLELISM": "false",
            # A runner that has looked at a GPU cannot hand it to a process that it forks.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        path = [str(anchor)]
        if self.python(peer) == Path(sys.executable):
            mine = self.packages.get(peer.name)
            inherited = os.environ.get("PYTHONPATH", "")
            # The user's own packages stay, since this Python may have torch among them.
            path = [*([str(mine)] if mine else []), *path, *filter(None, inherited.split(os.pathsep))]
        else:
            extra["PYTHONNOUSERSITE"] = "1"
        return {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(path)}

    def setup(self, which: list[Peer], say: Callable[[str], None]) -> None:
        """Install what is missing.

        Raises:
            BenchRefused: With what pip said last.
        """
        for peer in which:
            if self.python(peer) is not None:
                say(f"{peer.name}: there ({self.python(peer)})")
                continue
            folder = self.folder / peer.name
            say(f"{peer.name}: installing {peer.requirements[0]} into {folder}")
            venv.EnvBuilder(clear=True, with_pip=True).create(folder)
            packages = next(iter((folder / "lib").glob("python*/site-packages")))
            # After its own packages, so that a peer's versions win.
            (packages / "zz_ours.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
            pip = [str(self._python(peer)), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            # Without what they depend on: that is ours. Nor is a peer refused for the Python it asks for.
            pip += ["--no-deps", "--ignore-requires-python", *peer.requirements]
            answer = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=_INSTALL_S)
            if answer.returncode:
                said = [line for line in answer.stderr.splitlines() if line.strip()] or [
                    "no reason was given"
                ]
                raise BenchRefused(f"{peer.name} could not be installed: {said[-1].strip()}")
            stamp = folder / _STAMP
            stamp.write_text(json.dumps(self._wanted(peer)), encoding="utf-8")

    def _python(self, peer: Peer) -> Path:
        return self.folder / peer.name / "bin" / "python"

    def _wanted(self, peer: Peer) -> dict[str, object]:
        return {"requirements": list(peer.requirements), "beside": sys.prefix}

    def _stamp(self, peer: Peer) -> object:
        try:
            return json.loads((self.folder / peer.name / _STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def _kv_cache_gib() -> int:
    """On a CPU engine, the same for every peer: vLLM's default, most of the machine, is rarely free."""
    available: int = psutil.virtual_memory().available
    return max(1, min(4, available // (8 * 2**30)))


def _here(requirements: tuple[str, ...]) -> bool:
    """Whether this environment has exactly these versions."""
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        try:
            if metadata.version(name) != version:
                return False
        except metadata.PackageNotFoundError:
            return False
    return True

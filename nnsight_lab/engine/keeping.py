"""Starting a kept engine: `nnsight-lab serve` in a session of its own, watched until it answers.

Whoever starts it only watches: a kernel that dies meanwhile leaves a start that goes on, and the next kernel
finds it. An interrupt ends it, since that is what the person at the stop button asked for. The server is
started like any other, by its command line, but for what its user's kernel knows and a block must not: tokens
are left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nnsight_lab.engine import detached, kept, models, processes
from nnsight_lab.engine.config import OWN_OPTIONS, refuse_unknown
from nnsight_lab.engine.kept import Kept
from nnsight_lab.engine.log import EngineLog
from nnsight_lab.engine.option_names import served_option_names
from nnsight_lab.engine.starting import kv_cache_of_environment
from nnsight_lab.engine.status import StartProgress
from nnsight_lab.errors import CellUsageError, EngineStartFailed, Interrupted
from nnsight_lab.saves.budget import size_of
from nnsight_lab.wire.keys import ENGINE_ENV, KEPT_ENV, LOG_ENV, MODEL_ENV, OWNER_ENV

_TICK_S = 0.2
_SPAWN_S = 60.0
#: Of a user's own engine: what a shared one bounds for the others' sake.
_LIMITS = {"requests": 10**6, "edits": 10**4, "block_bytes": 2**30, "body_bytes": 2**32}
#: Not the server's to know, or of the notebook: some would change what it does.
_LEFT_OUT = (
    "JUPYTERHUB_API_TOKEN",
    "JPY_API_TOKEN",
    "NNSIGHT_LAB_TOKEN",
    "VLLM_API_KEY",
    "MPLBACKEND",
    "JPY_PARENT_PID",
    "JPY_SESSION_NAME",
    "VLLM_LOGGING_CONFIG_PATH",
    OWNER_ENV,
)
_FIRST_PHASE = "starting a process of its own, importing vLLM"


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a record has them.

    Raises:
        CellUsageError: One cannot be said on a command line.
    """
    found = {}
    for name, value in sorted(options.items()):
        if name in ("taps", "spill_budget"):
            raise CellUsageError(
                f"{name}= is for an engine of the kernel's own: a kept one does not take it."
            )
        value = str(value) if isinstance(value, os.PathLike) else value
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise CellUsageError(
                f"{name}={value!r} cannot be given to a kept engine: it takes text, numbers, lists and "
                "dictionaries."
            ) from None
    return found


def flags(options: Mapping[str, Any]) -> list[str]:
    """VLLM's command line for engine options; ours become limits."""
    # A line for each renewal of each kernel would fill the log.
    words = ["--disable-uvicorn-access-log"]
    words += [f"--limit={name}={value}" for name, value in _LIMITS.items()]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "save_budget":
            words.append(f"--limit=saved_bytes={size_of(value, name=name)}")
        elif value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *map(_word, value)]
        elif value is not None:
            words.append(f"{flag}={_word(value)}")
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def launch(
    name: str,
    model: str,
    options: Mapping[str, Any],
    *,
    engine: str,
    log: EngineLog,
    idle_minutes: float = kept.IDLE_MINUTES,
) -> Kept:
    """Start one, and do not wait for it; `kept.claimed` is held by the caller.

    Args:
        name: What it is called.
        model: As for `nnsight_lab.start`.
        options: As `plain_options` gave them.
        engine: The mark of its processes.
        log: What it prints.
        idle_minutes: As in its record.

    Raises:
        EngineStartFailed: Nothing was started.
    """
    record = Kept(
        name=name,
        engine=engine,
        model=model,
        pid=0,
        started=0.0,
        socket=str(kept.socket_of(engine)),
        log=str(log.path),
        since=time.time(),
        idle_minutes=float(idle_minutes),
        options=dict(options),
    )
    environment = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    environment |= {
        ENGINE_ENV: engine,
        LOG_ENV: str(log.path),
        MODEL_ENV: model,
        KEPT_ENV: kept.text_of(record),
    }
    # One that died is dead, as an engine of a kernel is: its owner is told, and starts it again.
    serve = ["-m", "nnsight_lab", "serve", model, "--level=solo", "--restarts=0", f"--uds={record.socket}"]
    words = [sys.executable, "-I", detached.__file__, str(log.path)]
    try:
        done = subprocess.run(
            [*words, sys.executable, *serve, *flags({**kv_cache_of_environment(options), **options})],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SPAWN_S,
            check=True,
        )
        pid = int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EngineStartFailed(f"A process of its own could not be started: {error}") from None
    record = kept.process_of(Kept(**{**vars(record), "pid": pid}))
    kept.write(record)
    return record


def check(model: str, options: Mapping[str, Any]) -> str:
    """Refuse what cannot work before anything is started.

    Returns:
        The model, as the server is to be told: a path that holds wherever it runs.

    Raises:
        ModelNotFound, CellUsageError, EngineStartFailed: Saying what.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineStartFailed(
            "vLLM is not installed here, so no engine can be started: pip install 'nnsight-lab[gpu]' (or "
            "'nnsight-lab[cpu]')."
        )
    names = served_option_names()
    if names:
        refuse_unknown(options, {*names, *OWN_OPTIONS})
    if model != models.DEMO:
        models.resolve(model, dummy=options.get("load_format") == "dummy")
    return where(model)


def where(model: str) -> str:
    """A model as any process of this user finds it: a path that begins at the root."""
    path = Path(model).expanduser()
    return str(path.absolute()) if model != models.DEMO and path.exists() else model


def wait(
    record: Kept,
    progress: Callable[[StartProgress], None],
    given_up: threading.Event,
    began: float,
    *,
    mine: bool = True,
) -> None:
    """Wait until it answers.

    Args:
        record: As `launch` gave it, or as it was found.
        progress: Told of the phases.
        given_up: Set by who no longer wants it.
        began: When the start began, by ``time.monotonic()``.
        mine: Whether it is this process's start, and ends when that is given up.

    Raises:
        EngineStartFailed: With the root cause; nothing is left of it.
        Interrupted: By the stop button; nothing is left of it where it was this process's start.
    """
    log = EngineLog(Path(record.log))
    phase, phase_began, done = _FIRST_PHASE, began, []
    try:
        while not (answers(record)):
            now = time.monotonic()
            latest = log.phase()
            if latest is not None and latest != phase:
                done.append((phase, now - phase_began))
                phase, phase_began = latest, now
            progress(StartProgress(phase, now - began, tuple(done)))
            if not record.alive():
                raise _failed(record, log, phase)
            if given_up.wait(_TICK_S):
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not mine:
            raise Interrupted(
                f"the start that another kernel began goes on: {record.attach_line} takes it when it is up, "
                f"%engine stop {record.name} ends it."
            ) from None
        processes.end_found(processes.engine_processes(record.engine), grace_s=2.0)
        kept.end(record, grace_s=1.0)
        raise Interrupted(
            f"the engine's start was given up after {time.monotonic() - began:.0f} s; nothing is left "
            "running."
        ) from None
    now = time.monotonic()
    progress(StartProgress("ready", now - began, (*done, (phase, now - phase_began))))


def answers(record: Kept) -> bool:
    """Whether its server takes connections."""
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(record.socket) == 0


def _failed(record: Kept, log: EngineLog, phase: str) -> EngineStartFailed:
    cause = log.root_cause() or _refusal(log) or "its process ended and left no word"
    kept.end(record, grace_s=1.0)
    return EngineStartFailed(
        f"The engine did not start ({phase}): {cause} (log: {log.path}; `%engine log` shows its tail)",
        cause=cause,
        log_path=str(log.path),
    )


def _refusal(log: EngineLog) -> str:
    """What a command says that takes no such argument, or will not run like that."""
    lines = [line for line in log.text().splitlines() if line.startswith("nnsight-lab")]
    return lines[-1].partition(": ")[2].removeprefix("error: ") if lines else ""

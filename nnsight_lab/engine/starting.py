"""Bringing an engine up: in phases people can watch, interruptible, and leaving nothing behind.

A start takes 15 to 60 seconds in three processes. The calling thread only watches: it shows phases
read from the log, takes the stop button at once, and turns a failure into its root cause.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing import resource_tracker, util
from typing import Any

import psutil

from nnsight_lab import pins
from nnsight_lab.engine import homecoming, models, processes, shared_queues
from nnsight_lab.engine.config import OWN_OPTIONS, EngineConfig, check_options
from nnsight_lab.engine.driver import Driver
from nnsight_lab.engine.log import SPAWNING, EngineLog
from nnsight_lab.engine.status import StartProgress
from nnsight_lab.errors import EngineStartFailed, Interrupted, LabError
from nnsight_lab.saves.budget import size_of
from nnsight_lab.wire.keys import MODEL_ENV, SAVES_CONFIG

_TICK_S = 0.2
_GIVE_UP_S = 15.0
KV_CACHE_VARIABLE = "NNSIGHT_LAB_KV_CACHE"
_KV_OPTIONS = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}


class Start:
    """One start of one engine."""

    def __init__(
        self,
        engine_id: str,
        config: EngineConfig,
        log: EngineLog,
        driver: Driver,
        progress: Callable[[StartProgress], None] | None,
    ) -> None:
        self.engine_id = engine_id
        self.config = config
        self.log = log
        self.driver = driver
        self.progress = progress
        #: How much shared memory saves may take, once it is known.
        self.save_budget_bytes = 0
        self._began = time.monotonic()
        self._phase = ""
        self._phase_began = self._began
        self._done: list[tuple[str, float]] = []

    def run(self) -> None:
        """Start and wait.

        Raises:
            EngineStartFailed: With the root cause.
            Interrupted: When the stop button was pressed.
        """
        __tracebackhide__ = True
        try:
            self._enter("finding the model")
            path = models.resolve(
                self.config.model, dummy=dict(self.config.options).get("load_format") == "dummy"
            )
            _log_to_file(self.log)
            options = dict(self.config.options)
            own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
            check_options(options)
            options.update(kv_cache_of_environment(options))
            homecoming.reclaim()
            shared_queues.reclaim()
            settings = homecoming.settings(self.engine_id, own)
            self.save_budget_bytes = settings["memory_bytes"]
            options["additional_config"] = {
                **(options.get("additional_config") or {}),
                SAVES_CONFIG: settings,
            }
            self.driver.home.limits = options["additional_config"][SAVES_CONFIG]
            pins.check(pins.CLIENT)
            self._enter("reading the model's structure")
            self._build(path, options)
        except KeyboardInterrupt:
            raise Interrupted(
                f"the engine's start was given up after {time.monotonic() - self._began:.0f} s; "
                "nothing is left running."
            ) from None
        except LabError:
            raise
        except Exception as error:
            raise self._failed(error) from None
        with contextlib.suppress(OSError):  # a home that cannot be written to: nothing is removed later
            shared_queues.note(self.engine_id)
        self._enter("ready")

    def _build(self, path: str, options: dict[str, Any]) -> None:
        launch = self.driver.launch
        with surroundings(self.engine_id, self.log, options, self.config.model, launch.spawned.set):
            building = self.driver.start(path, options)
            try:
                while not building.done():
                    time.sleep(_TICK_S)
                    # Their first records come when they have imported vLLM.
                    phase = self.log.phase() or (SPAWNING if launch.spawned.is_set() else None)
                    if phase is not None and phase != self._phase:
                        self._enter(phase)
                    self._tell()
                    if self.driver.given_up.is_set():
                        raise KeyboardInterrupt
                    if launch.failed.is_set():
                        self._give_up(building)
            except KeyboardInterrupt:
                self._give_up(building)
                raise
            building.result()

    def _give_up(self, building: Future[None]) -> None:
        """End what was started, and see that nothing more is: within the marked surroundings still."""
        self.driver.given_up.set()
        deadline = time.monotonic() + _GIVE_UP_S
        while not building.done() and time.monotonic() < deadline:
            processes.end([p.pid for p in processes.engine_processes(self.engine_id)], grace_s=1.0)
            time.sleep(_TICK_S / 2)

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        if self._phase and not any(name == self._phase for name, _ in self._done):
            self._done.append((self._phase, now - self._phase_began))
        self._phase, self._phase_began = phase, now
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(StartProgress(self._phase, time.monotonic() - self._began, tuple(self._done)))

    def _failed(self, error: BaseException) -> EngineStartFailed:
        # An exception of this process says it itself; one that points elsewhere is looked up.
        cause = f"{type(error).__name__}: {_sentence(error)}"
        if "root cause" in str(error).lower():
            cause = self.log.root_cause() or cause
        return EngineStartFailed(
            f"The engine did not start ({self._phase}): {cause} (log: {self.log.path}; `%engine log` shows "
            "its tail)",
            cause=cause,
            log_path=str(self.log.path),
        )


def _sentence(error: BaseException) -> str:
    """What an exception says, in one line: pydantic's and some others begin with a heading."""
    if hasattr(error, "error_count") and hasattr(error, "errors"):  # pydantic's ValidationError
        found = error.errors(include_url=False, include_context=False, include_input=False)
        said = [": ".join([*map(str, item["loc"]), item["msg"]]) for item in found]
        lines = "; ".join(said).splitlines()
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if len(lines) > 1 and lines[0].endswith(":"):
            lines = [f"{lines[0]} {lines[1]}"]
    return lines[0] if lines else "no message"


@contextlib.contextmanager
def surroundings(
    engine_id: str,
    log: EngineLog,
    options: Mapping[str, Any],
    model: str = "",
    spawned: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """What vLLM is started in: processes marked and detached, everything they say in the log.

    Args:
        engine_id: The mark.
        log: Where vLLM's records and whatever its processes print go.
        options: The engine options, for defaults that only the environment takes.
        model: As it was asked for.
        spawned: Called whenever a process was spawned.
    """
    extra = {
        MODEL_ENV: model,
        "VLLM_LOGGING_CONFIG_PATH": str(log.vllm_config()),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    space = cpu_kv_cache_gib(options)
    if space is not None:
        extra["VLLM_CPU_KVCACHE_SPACE"] = str(space)
    shares = cpus_of_ranks(options)
    if shares is not None:
        extra["VLLM_CPU_OMP_THREADS_BIND"] = shares
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "nnsight_lab" not in plugins.split(","):
        extra["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "nnsight_lab"]))
    # Python's own helper of this process, not the engine's: started before the mark, so that it
    # does not carry it and outlive the engine under its name. What it says of processes that were
    # killed ("leaked shared_memory objects", which it then removes) is for the log.
    with _redirected(log, 1, 2):
        resource_tracker.ensure_running()
    with processes.marked(engine_id, log.path, extra), _quiet(log, spawned), _own_excepthook():
        yield


@contextlib.contextmanager
def _own_excepthook() -> Iterator[None]:
    """Keep torch's hook off this process: each tree built here wraps one more ``[rank0]:`` around errors."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


def cpu_kv_cache_gib(options: Mapping[str, Any]) -> int | None:
    """The KV cache's size on a CPU engine, where nobody said one; None elsewhere.

    vLLM's CPU backend takes 92 % of a memory node by default, and refuses to start where that is not
    free; a notebook on a laptop or a shared server wants a cache, not the machine.
    """
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    said = "VLLM_CPU_KVCACHE_SPACE" in os.environ or not _KV_OPTIONS.isdisjoint(options)
    if said or not current_platform.is_cpu():
        return None
    available: int = psutil.virtual_memory().available
    return max(1, min(4, available // (8 * 2**30)))


def kv_cache_of_environment(options: Mapping[str, Any]) -> dict[str, int]:
    """The KV cache that ``NNSIGHT_LAB_KV_CACHE`` asks for, such as ``64MiB``, where nobody said one.

    vLLM's own ``VLLM_CPU_KVCACHE_SPACE`` knows whole gibibytes only, and a small container has none to give.
    """
    asked = os.environ.get(KV_CACHE_VARIABLE)
    if not asked or "VLLM_CPU_KVCACHE_SPACE" in os.environ or not _KV_OPTIONS.isdisjoint(options):
        return {}
    return {"kv_cache_memory_bytes": size_of(asked, name=KV_CACHE_VARIABLE)}


def cpus_of_ranks(options: Mapping[str, Any]) -> str | None:
    """Which cores each rank of a CPU engine computes on, where there are several and nobody said.

    vLLM gives each rank a memory node of its own, and does not start where there are fewer nodes than
    ranks, as on any laptop.
    """
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    ranks = math.prod(int(options.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline"))
    if ranks < 2 or "VLLM_CPU_OMP_THREADS_BIND" in os.environ or not current_platform.is_cpu():
        return None
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    starts = [rank * share % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)


def _log_to_file(log: EngineLog) -> None:
    """Send vLLM's records of this process to the file, not into the current cell."""
    handler = logging.FileHandler(log.path)
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S")
    )
    logger = logging.getLogger("vllm")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        if isinstance(old, logging.FileHandler):
            old.close()
    logger.addHandler(handler)
    logger.propagate = False


@contextlib.contextmanager
def _quiet(log: EngineLog, spawned: Callable[[], object]) -> Iterator[None]:
    """Send to the log what native code prints on fd 1 here, and all that new processes print.

    Gloo prints while the tree is built, into whatever cell is current; Python's own ``print`` in a
    notebook does not use fd 1. A new process logs to the file by itself once our plugin has run in it,
    but imports vLLM before that, so it is born with its output already there.
    """
    spawn = util.spawnv_passfds

    def into_log(path: Any, args: Any, passfds: Any) -> int:
        with _redirected(log, 1, 2):
            pid = spawn(path, args, passfds)
        spawned()
        return pid

    util.spawnv_passfds = into_log
    try:
        with _redirected(log, 1):
            yield
    finally:
        util.spawnv_passfds = spawn


@contextlib.contextmanager
def _redirected(log: EngineLog, *descriptors: int) -> Iterator[None]:
    """Point file descriptors of this process at the log for a while."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    kept = {}
    target = os.open(log.path, os.O_WRONLY | os.O_APPEND)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # a process may have none
            kept[descriptor] = os.dup(descriptor)
            os.dup2(target, descriptor)
    os.close(target)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        for descriptor, saved in kept.items():
            os.dup2(saved, descriptor)
            os.close(saved)

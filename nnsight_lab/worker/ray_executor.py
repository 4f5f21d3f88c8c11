"""Workers as Ray actors of a Ray that lives and dies with its engine.

vLLM's own Ray executor would join whatever cluster is there, or start one with a dashboard and an autoscaler
that nobody stops but its own process. Saves travel through shared memory, so all workers must be on the
kernel's machine: here EngineCore starts a Ray of its own, with nothing in it that an engine does not need,
and takes it down. All its processes carry the engine's mark, and go with EngineCore however that ends: Ray's
daemons are killed with it, but the two agents of its raylet outlive that by minutes, so a shell waits for
EngineCore's end and ends what is left in its process group.

On a CPU vLLM refuses Ray because it has no name for the resource that a rank takes (``ray_device_key``);
there a rank is given one of Ray's CPUs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ray
import torch
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2 as upstream

from nnsight_lab import pins
from nnsight_lab.worker.process import in_ray_actor

#: Waits for its input to end, ends a process group, and removes a folder. It is nobody's child and does not
#: carry the engine's mark: who ends all of those would end it before its time.
_LAST = """
exec 3<&0
(
    trap "" TERM INT HUP
    cat <&3 >/dev/null
    [ -z "$1" ] || kill -s KILL -- "-$1" 2>/dev/null
    rm -rf -- "$2"
) &
"""
#: The least that Ray takes for objects; nothing of ours goes through them.
_OBJECT_STORE_BYTES = 80 << 20


class LabRayWorkerProc(upstream.RayWorkerProc):
    """A rank in an actor."""

    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        in_ray_actor()
        if current_platform.is_cpu():
            _compute_on(_cores_of(rank))
        super().__init__(*args, rank=rank, **kwargs)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Where it is; on a CPU there are no GPUs to tell."""
        if current_platform.is_cpu():
            return ray.get_runtime_context().get_node_id(), []
        where: tuple[str, list[int]] = super().get_node_and_physical_gpu_ids()
        return where

    def initialize_worker(
        self, *args: Any, assigned_physical_gpu_ids: list[int] | None = None, **kwargs: Any
    ) -> None:
        """Load the model."""
        super().initialize_worker(
            *args, assigned_physical_gpu_ids=assigned_physical_gpu_ids or None, **kwargs
        )


class LabRayExecutor(upstream.RayExecutorV2):
    """vLLM's Ray executor on a Ray of its own."""

    def _init_executor(self) -> None:
        pins.check(pins.RAY)
        folder = tempfile.mkdtemp(prefix="nnl-ray-")  # a socket's path is 107 characters at most
        self._last = _ends_with_us(folder)
        cpus = {"num_cpus": self.parallel_config.world_size} if current_platform.is_cpu() else {}
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.WARNING,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            **cpus,
        )
        with _actors():
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        if current_platform.is_cpu():
            return {}  # what its place in the placement group has
        wanted: dict[str, Any] = upstream.RayExecutorV2._get_actor_resource_kwargs()
        return wanted

    def _join_monitor_thread(self) -> None:
        # It looks every five seconds, after which vLLM kills EngineCore; an actor's end wakes it.
        for handle in getattr(self, "ray_worker_handles", ()):
            with contextlib.suppress(Exception):
                ray.kill(handle.actor)
        super()._join_monitor_thread()

    def shutdown(self) -> None:
        """End the actors, then Ray."""
        super().shutdown()
        if ray.is_initialized():
            ray.shutdown()


def _ends_with_us(folder: str) -> Any:
    """See that nothing of Ray is left when this process has ended, whichever way.

    Returns:
        What is open until then.
    """
    group = str(os.getpid()) if os.getpgid(0) == os.getpid() else ""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _LAST, "nnsight-lab-ray", group, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
    )
    shell.wait()
    return shell.stdin


def _cores_of(rank: int) -> set[int]:
    """The cores of a rank: those that it was told, as vLLM tells the ranks that it starts itself."""
    shares = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "").split("|")
    allowed = os.sched_getaffinity(0)
    told = shares[rank].split(",") if rank < len(shares) else []
    return {int(core) for core in told if core.isdigit()} & allowed or allowed


def _compute_on(cores: set[int]) -> None:
    """Compute on these cores: Ray gives an actor one thread anywhere, and ranks on one core spin in turns."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


@contextlib.contextmanager
def _actors() -> Iterator[None]:
    """Have vLLM make its actors of our class, of a resource that this platform has."""
    key = current_platform.ray_device_key or "CPU"
    with (
        mock.patch.object(upstream, "RayWorkerProc", LabRayWorkerProc),
        mock.patch.object(type(current_platform), "ray_device_key", key),
    ):
        yield

"""nnsight's VLLM with this package's workers, whose blocks go through the engine.

The envoy tree, the meta build and the engine arguments are nnsight's; what is changed is which
worker class vLLM builds, that the tree is built while the engine's processes start, that every envoy
can be named across the process border by its path, and that ``model.trace``, ``model.edit`` and
``model.generate`` are the engine's own, so a notebook written against plain nnsight runs unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from nnsight.modeling.vllm import VLLM

from nnsight_lab import pins
from nnsight_lab.blocks.taps import DECODER_LAYERS, resolved
from nnsight_lab.engine.beside import Beside, Launch
from nnsight_lab.errors import Interrupted
from nnsight_lab.wire.keys import SCHEDULE_CONFIG, SCHEDULER

if TYPE_CHECKING:
    from nnsight_lab.engine.local import LocalEngine

_CPU_WORKER = "nnsight_lab.worker.cpu.LabCPUWorker"
_GPU_WORKER = "nnsight_lab.worker.gpu.LabGPUWorker"

#: A step of vLLM's async engine on a GPU. Its sync engine takes twice as much, though one of these fills a
#: GPU already, and what the last step of a call saved is copied with nothing left to hide it behind.
_STEP_TOKENS = 8192
#: The same of an engine on a CPU, where that many take seconds.
_CPU_STEP_TOKENS = 2048


def worker_class() -> str:
    """The worker for this machine, by dotted name: a kernel never imports it."""
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    return _CPU_WORKER if current_platform.is_cpu() else _GPU_WORKER


def prompts_cut() -> None:
    """Have vLLM decide of the prefix cache and of cutting prompts as this package does."""
    pins.check(pins.CLIENT)
    tokens = _CPU_STEP_TOKENS if worker_class() == _CPU_WORKER else _STEP_TOKENS
    pins.cut_prompts_by_default(SCHEDULER, tokens, SCHEDULE_CONFIG)


def step_size(options: Mapping[str, Any], *, on_cpu: bool) -> dict[str, int]:
    """The option for steps of `_STEP_TOKENS`, where nobody said otherwise and every prompt fits in one."""
    context = options.get("max_model_len")
    fits = isinstance(context, int) and context <= _STEP_TOKENS
    if on_cpu or not fits or options.get("enable_chunked_prefill") or "max_num_batched_tokens" in options:
        return {}
    return {"max_num_batched_tokens": _STEP_TOKENS}


def executor(options: Mapping[str, Any]) -> dict[str, Any]:
    """The option for workers as Ray actors, where somebody asked for them."""
    if options.get("distributed_executor_backend") != "ray":
        return {}
    from nnsight_lab.worker.ray_executor import LabRayExecutor  # Ray is no dependency

    return {"distributed_executor_backend": LabRayExecutor}


class LabVLLM(VLLM):
    """The envoy tree of an engine.

    Attributes:
        lab_engine: The engine this tree belongs to; None in a worker.
    """

    lab_engine: LocalEngine | None = None
    taps: tuple[str, ...]

    def __init__(self, *args: Any, launch: Launch | None = None, **kwargs: Any) -> None:
        self.__dict__["_launch"] = launch or Launch()
        super().__init__(*args, **kwargs)
        for envoy in self.modules():
            envoy.__dict__["_persistent_id"] = f"Envoy:{envoy.path}"

    @property
    def _WORKER_CLS(self) -> str:  # nnsight's name for vLLM's argument
        return worker_class()

    def _load(self, repo_id: str, **kwargs: Any) -> Any:
        if not (self.taps or kwargs.get("enforce_eager") or self._WORKER_CLS == _CPU_WORKER):
            self.taps = (DECODER_LAYERS,)
        if self.taps:
            # A prompt is bound by arithmetic, so it runs module by module and can be read anywhere; a step of
            # generation is bound by launches, so it replays (see `nnsight_lab.worker.steps`).
            given = kwargs.get("compilation_config") or {}
            if isinstance(given, dict):
                kwargs["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} | given
        if "scheduler_cls" not in kwargs:
            # None: nnsight says no to both, and vLLM, which knows the model, is not asked.
            kwargs = {"enable_prefix_caching": None, "enable_chunked_prefill": None} | kwargs
            kwargs["scheduler_cls"] = SCHEDULER
            prompts_cut()
        if self.taps not in ((), (DECODER_LAYERS,)):
            return super()._load(repo_id, **kwargs)  # patterns are read off the tree before anything starts
        meta = dict(kwargs)
        tree = Beside(lambda: self._load_meta(repo_id, **meta), self.__dict__["_launch"])
        self.__dict__["_module"] = tree  # nnsight builds none where one is there
        try:
            super()._load(repo_id, **kwargs)
        except BaseException as error:
            # What this process failed with says more than that the engine was ended for it.
            raise tree.drop() or error from None
        finally:
            del self.__dict__["_module"]
        module = tree.result()
        self.taps = resolved(self.taps, module)
        return module

    def _resolve_taps(self, module: Any) -> tuple[str, ...]:
        """The taps of the engine; of decoder layers the worker knows the names."""
        if self.taps == (DECODER_LAYERS,):
            return self.taps
        taps: tuple[str, ...] = super()._resolve_taps(module)
        return taps

    @staticmethod
    def _init_distributed() -> None:
        """Nothing: the tree is built later, and brings up the group that it needs (see `_load_meta`)."""

    def _load_meta(self, repo_id: str, **kwargs: Any) -> Any:
        kwargs.pop("distributed_executor_backend", None)  # it has no workers
        with pins.meta_tree_on_cpu(), _group_of_one():
            return super()._load_meta(repo_id, **kwargs)

    def _load_sync(self, repo_id: str, **kwargs: Any) -> Any:
        from vllm import LLM

        self._go_on()
        kwargs |= step_size(kwargs, on_cpu=self._WORKER_CLS == _CPU_WORKER) | executor(kwargs)
        # Not nnsight's: its engine class collects after every step that finishes a request, also
        # of requests without a block. The driver collects, and only where there is something.
        return LLM(repo_id, worker_cls=self._WORKER_CLS, enforce_eager=not self.taps, **kwargs)

    def _load_async(self, repo_id: str, **kwargs: Any) -> Any:
        self._go_on()
        return super()._load_async(repo_id, **{**kwargs, **executor(kwargs)})

    def _go_on(self) -> None:
        """The last moment before processes are spawned: not if the start was given up meanwhile."""
        if self.__dict__["_launch"].given_up.is_set():
            raise Interrupted("The engine's start was given up.")

    def _engine(self) -> LocalEngine:
        if self.lab_engine is None:
            raise RuntimeError("this tree belongs to no engine")
        return self.lab_engine

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """`LocalEngine.trace`."""
        return self._engine().trace(*inputs, **kwargs)

    def edit(self, name: str | None = None, **kwargs: Any) -> Any:
        """`LocalEngine.edit`; the name is required."""
        return self._engine().edit(name, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """`LocalEngine.generate`; a block is written ``with model.trace(...)``."""
        return self._engine().generate(*inputs, **kwargs)

    def clear_edits(self) -> None:
        """Clear every edit of the engine."""
        self._engine().edits.clear()


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """The process group that vLLM's layers ask for when they are built; one that is there already is used."""
    if torch.distributed.is_initialized():
        yield
        return
    VLLM._init_distributed()
    try:
        yield
    finally:
        VLLM._cleanup_distributed()

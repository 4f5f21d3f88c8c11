"""nnsight's VLLM with this package's workers, whose blocks go through the engine.

The envoy tree, the meta build and the engine arguments are nnsight's; what is changed is which
worker class vLLM builds, that every envoy can be named across the process border by its path, and
that ``model.trace``, ``model.edit`` and ``model.generate`` are the engine's own, so a notebook
written against plain nnsight runs unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnsight.modeling.vllm import VLLM

from nnsight_lab import pins
from nnsight_lab.blocks.decoder_layers import DECODER_LAYERS, decoder_layers
from nnsight_lab.errors import Interrupted

if TYPE_CHECKING:
    from nnsight_lab.engine.local import LocalEngine

_CPU_WORKER = "nnsight_lab.worker.cpu.LabCPUWorker"
_GPU_WORKER = "nnsight_lab.worker.gpu.LabGPUWorker"

#: A step of vLLM's async engine on a GPU. Its sync engine takes twice as much, though one of these fills a
#: GPU already, and what the last step of a call saved is copied with nothing left to hide it behind.
_STEP_TOKENS = 8192


def worker_class() -> str:
    """The worker for this machine, by dotted name: a kernel never imports it."""
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    return _CPU_WORKER if current_platform.is_cpu() else _GPU_WORKER


def step_size(options: Mapping[str, Any], *, on_cpu: bool) -> dict[str, int]:
    """The option for steps of `_STEP_TOKENS`, where nobody said otherwise and every prompt fits in one."""
    context = options.get("max_model_len")
    fits = isinstance(context, int) and context <= _STEP_TOKENS
    if on_cpu or not fits or options.get("enable_chunked_prefill") or "max_num_batched_tokens" in options:
        return {}
    return {"max_num_batched_tokens": _STEP_TOKENS}


class LabVLLM(VLLM):
    """The envoy tree of an engine.

    Attributes:
        lab_engine: The engine this tree belongs to; None in a worker.
    """

    lab_engine: LocalEngine | None = None
    taps: tuple[str, ...]

    def __init__(self, *args: Any, given_up: threading.Event | None = None, **kwargs: Any) -> None:
        self.__dict__["_given_up"] = given_up
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
        return super()._load(repo_id, **kwargs)

    def _resolve_taps(self, module: Any) -> tuple[str, ...]:
        """The taps of the engine; those of every decoder layer where none were given."""
        if self.taps != (DECODER_LAYERS,):
            taps: tuple[str, ...] = super()._resolve_taps(module)
            return taps
        return decoder_layers(module)

    def _load_meta(self, repo_id: str, **kwargs: Any) -> Any:
        with pins.meta_tree_on_cpu():
            return super()._load_meta(repo_id, **kwargs)

    def _load_sync(self, repo_id: str, **kwargs: Any) -> Any:
        from vllm import LLM

        self._go_on()
        kwargs |= step_size(kwargs, on_cpu=self._WORKER_CLS == _CPU_WORKER)
        # Not nnsight's: its engine class collects after every step that finishes a request, also
        # of requests without a block. The driver collects, and only where there is something.
        return LLM(repo_id, worker_cls=self._WORKER_CLS, enforce_eager=not self.taps, **kwargs)

    def _load_async(self, repo_id: str, **kwargs: Any) -> Any:
        self._go_on()
        return super()._load_async(repo_id, **kwargs)

    def _go_on(self) -> None:
        """The last moment before processes are spawned: not if the start was given up meanwhile."""
        given_up = self.__dict__.get("_given_up")
        if given_up is not None and given_up.is_set():
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

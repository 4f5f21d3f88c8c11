"""A research environment for looking inside language models, in a notebook, at vLLM speed.

Start an engine once; write ``%%trace`` and ``%%edit`` cells of ordinary Python that run inside the
model's forward pass; read what they saved. In plain Python the same is::

    import nnsight_lab as lab

    engine = lab.start("demo")
    model = engine.model
    with lab.trace("The Eiffel Tower is in the city of", max_tokens=1, temperature=0):
        hidden = model.model.layers[12].output[0].save()

Importing this package is cheap and loads neither torch, nnsight, vLLM nor IPython; the first engine
does.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING, Any

from nnsight_lab import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_lab.engine.local import LocalEngine
    from nnsight_lab.engine.status import StartProgress, StopReport
    from nnsight_lab.engine.stream import Stream
    from nnsight_lab.engine.tracer import EditTracer, LabTracer

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "aattention",
    "agenerate",
    "alogit_lens",
    "attention",
    "edit",
    "edits",
    "engines",
    "errors",
    "generate",
    "get_engine",
    "lens",
    "load_ipython_extension",
    "logit_lens",
    "residual",
    "restart",
    "start",
    "stop",
    "stream",
    "trace",
    "unload_ipython_extension",
]


def _manager() -> Any:
    # Local: the engine room imports torch, nnsight and vLLM, which take seconds.
    from nnsight_lab.engine.manager import manager

    return manager


def start(
    model: str,
    *,
    name: str = "main",
    mode: str = "auto",
    restart: bool = False,
    progress: Callable[[StartProgress], None] | None = None,
    **options: Any,
) -> LocalEngine:
    """Start an engine, or return the live one of that name with the same configuration.

    Args:
        model: ``"demo"`` (a small real model that comes as a package), a Hugging Face id, or a path.
        name: Several engines may live side by side under different names.
        mode: ``"async"`` (streaming, in notebooks), ``"sync"`` (scripts), or ``"auto"``.
        restart: Replace a live engine of that name; its edits are put back.
        progress: Called about five times a second with the phase of the start.
        **options: vLLM's engine options, such as ``dtype="float32"`` or ``max_model_len=2048``.

    Raises:
        ModelNotFound, CellUsageError, EngineMismatch: Before anything is started.
        EngineStartFailed: With the root cause; nothing is left running.
    """
    __tracebackhide__ = True
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A process of an engine imports the script that started it, and would start engines for ever.
        raise errors.EngineStartFailed(
            "this script starts an engine as soon as it is imported, which the engine's own processes do: "
            'put the code that uses it under `if __name__ == "__main__":`'
        )
    # Local: this module stays light; the import is watched, since it takes most of a first start.
    from nnsight_lab.engine.importing import later, load

    progress = later(progress, load(progress))
    found: LocalEngine = _manager().start(
        model, name=name, mode=mode, restart=restart, progress=progress, **options
    )
    return found


def get_engine(name: str | None = None) -> LocalEngine:
    """The engine of that name, or the current one: the last started."""
    if not engines():  # said without importing torch
        raise errors.EngineNotStarted(
            "No engine is running: %engine start demo (or a Hugging Face id or path)."
        )
    found: LocalEngine = _manager().engine(name)
    return found


def engines() -> dict[str, LocalEngine]:
    """Every engine of this process, by name; empty (and cheap) when none was started."""
    if "nnsight_lab.engine.manager" not in sys.modules:
        return {}
    found: dict[str, LocalEngine] = _manager().engines()
    return found


def restart(name: str | None = None, progress: Callable[[StartProgress], None] | None = None) -> LocalEngine:
    """Start an engine again, dead or alive, with its configuration and its edits."""
    __tracebackhide__ = True
    found: LocalEngine = _manager().restart(name, progress)
    return found


def stop(name: str | None = None) -> StopReport:
    """Stop an engine; the report says that its processes and memory are gone."""
    report: StopReport = _manager().stop(name)
    return report


def trace(*prompts: Any, engine: str | None = None, **options: Any) -> LabTracer:
    """``with lab.trace("…", max_tokens=8) as tracer:`` on the current engine; see `LocalEngine.trace`."""
    __tracebackhide__ = True
    return _manager().engine(engine).trace(*prompts, **options)  # type: ignore[no-any-return]


def edit(name: str | None = None, *, engine: str | None = None, **options: Any) -> EditTracer:
    """``with lab.edit("probe") as (tracer, edit):`` on the current engine; see `LocalEngine.edit`."""
    __tracebackhide__ = True
    return _manager().engine(engine).edit(name, **options)  # type: ignore[no-any-return]


def edits(engine: str | None = None) -> Any:
    """The edits of the current engine, in the order they run."""
    return _manager().engine(engine).edits


def generate(*prompts: Any, engine: str | None = None, **options: Any) -> list[Any]:
    """Run prompts on the current engine; see `LocalEngine.generate`."""
    __tracebackhide__ = True
    outputs: list[Any] = _manager().engine(engine).generate(*prompts, **options)
    return outputs


async def agenerate(*prompts: Any, engine: str | None = None, **options: Any) -> list[Any]:
    """`generate`, awaited."""
    __tracebackhide__ = True
    outputs: list[Any] = await _manager().engine(engine).agenerate(*prompts, **options)
    return outputs


def stream(
    *prompts: Any, engine: str | None = None, edits: Sequence[str] | None = None, **sampling: Any
) -> Stream:
    """Outputs as they grow, on the current engine; see `LocalEngine.stream`."""
    found: Stream = _manager().engine(engine).stream(*prompts, edits=edits, **sampling)
    return found


def residual(output: Any) -> Any:
    """The residual stream ``[token, hidden]`` from a decoder layer's ``.output``, fused or not.

    ``lab.residual(model.model.layers[3].output).save()`` in a block. On Llama-likes the stream is
    ``output[0] + output[1]``; ``output[0]`` alone is only what the layer's MLP wrote.
    """
    from nnsight_lab.lens.residual import residual as of_layer  # torch

    return of_layer(output)


def logit_lens(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """What each layer would say next, on the current engine: ``lab.logit_lens("…", target=" Paris")``.

    A `LogitLens` (a list of them for several prompts): top tokens, entropy in nats, and the ranks of the
    model's own next token and of a target, ``[layer, position]``. See `LocalEngine.logit_lens`.
    """
    __tracebackhide__ = True
    return _manager().engine(engine).logit_lens(*prompts, **options)


async def alogit_lens(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """`logit_lens`, awaited."""
    __tracebackhide__ = True
    return await _manager().engine(engine).alogit_lens(*prompts, **options)


def attention(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """Attention patterns, on the current engine: ``lab.attention("…", layers=[3])``.

    An `Attention` with ``patterns`` ``[layer, head, query, key]`` (a list of them for several
    prompts). See `LocalEngine.attention`.
    """
    __tracebackhide__ = True
    return _manager().engine(engine).attention(*prompts, **options)


async def aattention(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """`attention`, awaited."""
    __tracebackhide__ = True
    return await _manager().engine(engine).aattention(*prompts, **options)


def __getattr__(name: str) -> Any:
    # `lab.lens` needs torch: imported when first asked for.
    if name == "lens":
        import importlib

        return importlib.import_module("nnsight_lab.lens")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nnsight_lab``: the ``%%trace``, ``%%edit``, ``%engine`` and ``%edits`` magics."""
    from nnsight_lab.magics.extension import load_ipython_extension as load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext nnsight_lab``: remove all of it."""
    from nnsight_lab.magics.extension import unload_ipython_extension as unload

    unload(shell)

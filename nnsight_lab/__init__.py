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
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from nnsight_lab import errors

if TYPE_CHECKING:
    import os
    import types
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from nnsight_lab.engine.estimate import Estimate
    from nnsight_lab.engine.kept import Kept
    from nnsight_lab.engine.local import Engine
    from nnsight_lab.engine.status import StartProgress, StopReport
    from nnsight_lab.engine.stream import Stream
    from nnsight_lab.engine.tracer import EditTracer, LabTracer
    from nnsight_lab.lens.sequence import Tokens
    from nnsight_lab.plots.token_strip import TokenStrip as StillStrip
    from nnsight_lab.runs.run import LiveRun
    from nnsight_lab.saves.saved_file import SavedFile
    from nnsight_lab.saves.store import SavesStore
    from nnsight_lab.widgets.browser import SavesBrowser
    from nnsight_lab.widgets.token_strip import TokenStrip

    def saves(engine: str | None = None) -> SavesStore:
        """The saves of every request of the current engine, by label."""
else:
    from nnsight_lab import saves  # a room that can be called, and as light as this file

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "aattention",
    "aestimate",
    "agenerate",
    "alogit_lens",
    "attach",
    "attention",
    "browse",
    "detach",
    "edit",
    "edits",
    "engines",
    "errors",
    "estimate",
    "generate",
    "get_engine",
    "kept",
    "lens",
    "live",
    "load_ipython_extension",
    "logit_lens",
    "plot",
    "read",
    "residual",
    "restart",
    "saves",
    "start",
    "stop",
    "stream",
    "token_strip",
    "tokens",
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
    keep: bool = False,
    idle_minutes: float = 240.0,
    progress: Callable[[StartProgress], None] | bool | None = None,
    **options: Any,
) -> Engine:
    """Start an engine, or return the live one of that name with the same configuration.

    Args:
        model: ``"demo"`` (a small real model that comes as a package), a Hugging Face id, or a path.
        name: Several engines may live side by side under different names.
        mode: ``"async"`` (streaming, in notebooks), ``"sync"`` (scripts), or ``"auto"``.
        restart: Replace a live engine of that name; its edits are put back.
        keep: Run it in a process of its own that goes on when this one ends: `attach` takes it again, from
            whatever kernel of this user on this machine, and this call does where it runs already with the
            same configuration. ``stop`` ends it, `detach` and the kernel's end let go of it.
        idle_minutes: Of a kept engine: without a kernel and without a request, until it ends itself; 0 for
            never.
        progress: Whether to show the phases of the start in one line that moves, as ``%engine start`` does;
            where it is None, in a notebook and on a terminal, never in a pipe. Or a function, called about
            five times a second with the phase.
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

    kept = {"keep": True, "idle_minutes": idle_minutes} if keep else {}

    def begin(watch: Callable[[StartProgress], None] | None) -> Engine:
        __tracebackhide__ = True
        if not keep:  # whose server imports vLLM, and this process does not
            watch = later(watch, load(watch))
        found: Engine = _manager().start(
            model, name=name, mode=mode, restart=restart, progress=watch, **kept, **options
        )
        return found

    return _watched(f"engine {name}", str(model), progress, begin)


def _watched(
    head: str,
    model: str,
    progress: Callable[[StartProgress], None] | bool | None,
    begin: Callable[[Callable[[StartProgress], None] | None], Engine],
) -> Engine:
    """What ``begin`` starts, with its phases shown to whoever watches."""
    __tracebackhide__ = True
    if progress is not None and not isinstance(progress, bool):
        return begin(progress)
    if progress is False:
        return begin(None)
    from nnsight_lab.magics.start_line import StartLine, watched  # IPython

    if progress is None and not watched():
        return begin(None)
    line = StartLine(head, model)
    return line.around(lambda: begin(line.progress))  # type: ignore[return-value]


def attach(url: str | None = None, *, name: str | None = None, token: str | None = None) -> Engine:
    """Use an engine that `nnsight-lab serve` runs, or one that you keep: the same cells, against it.

    Args:
        url: ``http://host:port``, a JupyterHub service's address, or ``unix:/path/of/socket``; or the name of
        a
            kept engine (see `kept`). None takes the kept engine there is.
        name: What it is called here; a kept engine's own name, else ``"main"``, where it is None.
        token: Who you are; ``$NNSIGHT_LAB_TOKEN`` or this server's JupyterHub token where it is None.

    Raises:
        ServerError: The server is not there, or does not let this kernel in.
        EngineNotStarted: No engine is kept under that name, or it is to be said which of several.
    """
    __tracebackhide__ = True
    found: Engine = _manager().attach(url, name=name, token=token)
    return found


def detach(name: str | None = None) -> None:
    """Let go of a kept engine, or of a server's: it goes on, and this kernel's edits leave it."""
    __tracebackhide__ = True
    _manager().detach(name)


def kept() -> list[Kept]:
    """The engines that this user keeps on this machine, by name; of whatever kernel, and of none."""
    from nnsight_lab.engine.kept import all_kept  # psutil

    return all_kept()


def get_engine(name: str | None = None) -> Engine:
    """The engine of that name, or the current one: the last started."""
    if not engines():  # said without importing torch
        from nnsight_lab.engine.kept import none_here  # psutil

        raise errors.EngineNotStarted(none_here())
    found: Engine = _manager().engine(name)
    return found


def engines() -> dict[str, Engine]:
    """Every engine of this process, by name; empty (and cheap) when none was started."""
    if "nnsight_lab.engine.manager" not in sys.modules:
        return {}
    found: dict[str, Engine] = _manager().engines()
    return found


def restart(
    name: str | None = None, progress: Callable[[StartProgress], None] | bool | None = None
) -> Engine:
    """Start an engine again, dead or alive, with its configuration and its edits.

    ``progress`` is as for `start`.
    """
    __tracebackhide__ = True
    known: Engine = _manager().engine(name)
    return _watched(f"engine {known.name}", "", progress, lambda watch: _manager().restart(known.name, watch))


def stop(name: str | None = None) -> StopReport:
    """Stop an engine; the report says that its processes and memory are gone.

    A kept engine ends for every kernel, also by its name where this one is not attached; see `detach`.
    """
    report: StopReport = _manager().stop(name)
    return report


def trace(*prompts: Any, engine: str | None = None, **options: Any) -> LabTracer:
    """``with lab.trace("…", max_tokens=8) as tracer:`` on the current engine; see `Engine.trace`."""
    __tracebackhide__ = True
    return _manager().engine(engine).trace(*prompts, **options)  # type: ignore[no-any-return]


def edit(name: str | None = None, *, engine: str | None = None, **options: Any) -> EditTracer:
    """``with lab.edit("probe") as (tracer, edit):`` on the current engine; see `Engine.edit`."""
    __tracebackhide__ = True
    return _manager().engine(engine).edit(name, **options)  # type: ignore[no-any-return]


def edits(engine: str | None = None) -> Any:
    """The edits of the current engine, in the order they run."""
    return _manager().engine(engine).edits


def generate(*prompts: Any, engine: str | None = None, **options: Any) -> list[Any]:
    """Run prompts on the current engine; see `Engine.generate`."""
    __tracebackhide__ = True
    outputs: list[Any] = _manager().engine(engine).generate(*prompts, **options)
    return outputs


async def agenerate(*prompts: Any, engine: str | None = None, **options: Any) -> list[Any]:
    """`generate`, awaited."""
    __tracebackhide__ = True
    outputs: list[Any] = await _manager().engine(engine).agenerate(*prompts, **options)
    return outputs


def estimate(*prompts: Any, engine: str | None = None, **options: Any) -> Estimate:
    """What saving would cost on the current engine, before it is run; see `Engine.estimate`."""
    __tracebackhide__ = True
    found: Estimate = _manager().engine(engine).estimate(*prompts, **options)
    return found


async def aestimate(*prompts: Any, engine: str | None = None, **options: Any) -> Estimate:
    """`estimate`, awaited."""
    __tracebackhide__ = True
    found: Estimate = await _manager().engine(engine).aestimate(*prompts, **options)
    return found


def stream(
    *prompts: Any, engine: str | None = None, edits: Sequence[str] | None = None, **sampling: Any
) -> Stream:
    """Outputs as they grow, on the current engine; see `Engine.stream`."""
    found: Stream = _manager().engine(engine).stream(*prompts, edits=edits, **sampling)
    return found


def live(*prompts: Any, engine: str | None = None, **options: Any) -> LiveRun:
    """Run one prompt on the current engine and watch its tokens come; see `Engine.live`.

    ``run = lab.live("…", max_tokens=200)``: the cell goes on; ``await run`` gives the output.
    """
    __tracebackhide__ = True
    found: LiveRun = _manager().engine(engine).live(*prompts, **options)
    return found


def read(path: str | os.PathLike[str]) -> SavedFile:
    """Open saves that `SavesStore.write` or ``%saves write`` wrote, by the name of either file or their stem.

    Nothing of a tensor is read before it is touched, and no engine is needed.

    Raises:
        FileRefused: A file is missing, cut off, damaged, or not what it should be; says why.
    """
    from nnsight_lab.saves import files  # torch

    return files.read(path)


def browse(engine: str | None = None) -> SavesBrowser:
    """The saves of the current engine as a table to sort, search, open and compare; ``%saves`` shows it too.

    ``nnsight_lab.widgets.SavesBrowser(store)`` does the same for any store.
    """
    __tracebackhide__ = True
    found = get_engine(engine)
    from nnsight_lab.widgets.browser import SavesBrowser as of_store  # torch and anywidget
    from nnsight_lab.widgets.prompt_tokens import PromptTokens

    name = "lab.saves()" if engine is None else f"lab.saves({engine!r})"
    return of_store(found.saves, name=name, tokens=PromptTokens(found))


def residual(output: Any) -> Any:
    """The residual stream ``[token, hidden]`` from a decoder layer's ``.output``, fused or not.

    ``lab.residual(model.model.layers[3].output).save()`` in a block. On Llama-likes the stream is
    ``output[0] + output[1]``; ``output[0]`` alone is only what the layer's MLP wrote.
    """
    from nnsight_lab.lens.residual import residual as of_layer  # torch

    return of_layer(output)


def _progress(what: str, options: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
    """A look's options, with a bar under the cell where a shell runs and no other progress was asked for."""
    ipython = sys.modules.get("IPython")
    if "progress" in options or ipython is None or ipython.get_ipython() is None:
        return nullcontext(options)
    from nnsight_lab.magics.progress import shown  # IPython

    return shown(what, options)


def logit_lens(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """What each layer would say next, on the current engine: ``lab.logit_lens("…", target=" Paris")``.

    A `LogitLens` (a list of them for several prompts): top tokens, entropy in nats, and the ranks of the
    model's own next token and of a target, ``[layer, position]``. See `Engine.logit_lens`.
    """
    __tracebackhide__ = True
    with _progress("Logit lens", options) as shown:
        return _manager().engine(engine).logit_lens(*prompts, **shown)


async def alogit_lens(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """`logit_lens`, awaited."""
    __tracebackhide__ = True
    with _progress("Logit lens", options) as shown:
        return await _manager().engine(engine).alogit_lens(*prompts, **shown)


def attention(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """Attention patterns, on the current engine: ``lab.attention("…", layers=[3])``.

    An `Attention` with ``patterns`` ``[layer, head, query, key]`` (a list of them for several
    prompts). See `Engine.attention`.
    """
    __tracebackhide__ = True
    with _progress("Attention", options) as shown:
        return _manager().engine(engine).attention(*prompts, **shown)


async def aattention(*prompts: Any, engine: str | None = None, **options: Any) -> Any:
    """`attention`, awaited."""
    __tracebackhide__ = True
    with _progress("Attention", options) as shown:
        return await _manager().engine(engine).aattention(*prompts, **shown)


def tokens(what: Any, engine: str | None = None) -> Tokens:
    """The tokens of a text, by the current engine's tokenizer: their texts, with their ids as ``.ids``.

    ``lab.tokens("Paris is")``; also of token ids, of a trace or a request's output (its prompt), of a
    completion (``output.outputs[0]``, what was generated), and of a saved value's label. Plots and
    `token_strip` take them as ``tokens=``.
    """
    __tracebackhide__ = True
    found = get_engine(engine)
    from nnsight_lab.lens.sequence import tokens_of  # torch

    return tokens_of(found.tokenizer, what)


def token_strip(tokens: Any, scores: Any, **options: Any) -> TokenStrip | StillStrip:
    """Tokens with scores as colours behind them; see `nnsight_lab.plots.token_strip.token_strip`.

    ``strip = lab.token_strip(lab.tokens(tracer), scores)``, or with texts, ``token_ids=ids``; scores are
    ``[token]``, or ``[row, token]`` for a row per layer or head. A click or Enter on a token chooses that
    position in every view of the same tokens; ``strip.position`` is the choice, and setting it chooses.

    Returns:
        A widget, which is html where no widget runs; the html alone where the widgets were not built.
    """
    __tracebackhide__ = True
    from nnsight_lab.plots.token_strip import token_strip as of_tokens  # torch and plotly

    still = of_tokens(tokens, scores, **options)
    from nnsight_lab.widgets.token_strip import TokenStrip as of_strip  # anywidget

    try:
        return of_strip(still)
    except errors.WidgetError:
        return still


#: Rooms that are loaded when they are first asked for: ``lab.lens`` needs torch, ``lab.plot`` plotly.
_LATER = {"lens": "nnsight_lab.lens", "plot": "nnsight_lab.plots"}


def __getattr__(name: str) -> types.ModuleType:
    """``lab.lens`` and ``lab.plot``."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    room = globals()[name] = importlib.import_module(_LATER[name])
    return room


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nnsight_lab``: ``%%trace``, ``%%edit``, ``%engine``, ``%edits`` and ``%saves``."""
    from nnsight_lab.magics.extension import load_ipython_extension as load
    from nnsight_lab.panel.control import load_panel

    load(shell)
    load_panel(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext nnsight_lab``: remove all of it."""
    from nnsight_lab.magics.extension import unload_ipython_extension as unload
    from nnsight_lab.panel.control import unload_panel

    unload_panel(shell)
    unload(shell)

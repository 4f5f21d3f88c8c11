"""The two objects behind ``with lab.trace(...)`` and ``with lab.edit(...)``.

nnsight's capture does the hard part: it takes the body of the ``with`` out of the user's frame and
keeps Python from running it there. These two say what happens then: the block becomes requests of
the engine (a trace), or stays on it (an edit). Both work as ``with`` and as ``async with``, on a sync
and on an async engine; what a trace saved is bound in the frame when the block ends.

nnsight reads the frame at a fixed depth, so the tracer is returned to the user as it is and never
wrapped in another context manager.
"""

from __future__ import annotations

import ast
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from nnsight.intervention.interleaver import Mediator
from nnsight.intervention.tracer import Invoker
from nnsight.intervention.util import clear_shared_locals, shared_locals
from nnsight.modeling.vllm.tracer import VLLMTracer
from nnsight.tracing.tracer import _saves, skip_context, skippable
from nnsight.tracing.util import Scope, push

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.sources import keep_current
from nnsight_lab.blocks.stubs import block_tracer
from nnsight_lab.blocks.unkept import unkept
from nnsight_lab.engine.call import Call, Progress
from nnsight_lab.engine.edits import Edit, EditVersion
from nnsight_lab.engine.feed import Feed, View, one_request
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.engine.step_words import RanSteps, longest
from nnsight_lab.engine.waiting import InterruptedTask
from nnsight_lab.errors import EditRefused, Interrupted, RequestRefused

if TYPE_CHECKING:
    from nnsight_lab.engine.estimate import Estimate
    from nnsight_lab.engine.estimating import EngineEstimates
    from nnsight_lab.engine.service import EngineService

Watcher = Callable[[list[Progress]], None]

_collecting = threading.RLock()


class WholeFile:
    """Finds a block by parsing the file it is in, as nnsight does when it cannot slice the block out.

    nnsight 0.8.1 slices the block first and dedents the slice, which takes the indentation out of
    multi-line strings too: in a function or under an ``if``, a block would run with other text than
    was written.
    """

    def parse(self, source: str, lineno: int) -> ast.With | ast.AsyncWith | None:
        """The ``with`` statement entered from ``lineno``, or None."""
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.With | ast.AsyncWith) and (
                node.lineno == lineno or any(item.context_expr.lineno == lineno for item in node.items)
            ):
                return node
        return None


class LabInvoker(WholeFile, Invoker):
    """One ``with tracer.invoke("…"):`` block of a trace."""


class _LabTracer(WholeFile, VLLMTracer):
    """What a trace and an edit share: they travel as a bare tracer of the worker's model.

    Attributes:
        hint: Told what the block seems to save and does not; a warning where it is None.
    """

    def __init__(self, engine: EngineService, backend: Callable[[Any], None]) -> None:
        super().__init__(engine.model, "__call__", backend=backend)
        self.engine = engine
        self.hint: Callable[[str], object] | None = None

    def __reduce__(self) -> Any:
        # A block that says `tracer.all()` needs a tracer there, not this one with its prompts.
        return block_tracer, (self.engine.model,)

    def _block(self, node: Any, code: CodeType, glbls: dict[str, Any], lcls: Mapping[str, Any]) -> Block:
        saved = _saves()
        presaved = frozenset(name for name, value in lcls.items() if id(value) in saved)
        return Block.capture(node, code.co_filename, glbls, lcls, presaved)  # type: ignore[arg-type]

    def _say_unkept(self, frame: FrameType, kept: Sequence[str] = ()) -> None:
        for line in unkept(self.node.body, kept):
            if self.hint is not None:
                self.hint(line)
            else:  # at the block's own line, however deep in a loop of tasks this runs
                warnings.warn_explicit(line, UserWarning, frame.f_code.co_filename, self.node.lineno)


class Invokes:
    """Collects the prompts of ``with tracer.invoke(...)`` while the trace's body runs in the kernel."""

    def __init__(self) -> None:
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def add(self, *inputs: Any, **settings: Any) -> list[int]:
        """Note one invoke; the group only has to be its place."""
        if len(inputs) != 1:
            raise RequestRefused(
                "Each `tracer.invoke(...)` takes exactly one prompt: it is one request. Give every invoke a "
                "prompt, or hand the list of prompts to the trace itself."
            )
        self.given.append((inputs, settings))
        return [len(self.given) - 1, 1]


class LabTracer(_LabTracer):
    """A trace: a block that runs inside the forward passes of one or several requests.

    Attributes:
        outputs: vLLM's ``RequestOutput`` of each request, with ``.saves``, once the block has ended.
        names: The names the trace bound in the user's frame.
        estimate: What it would save, where that is all that was asked for; else None.
        live: The view of it while it runs, where one was asked for; else None.
    """

    def __init__(
        self,
        engine: EngineEstimates,
        prompts: Sequence[Any],
        *,
        several: bool,
        edits: Sequence[str] | None,
        watch: Watcher | None,
        settings: Mapping[str, Any],
        estimating: bool = False,
        save_check: bool = True,
        live: Callable[[], View] | None = None,
    ) -> None:
        super().__init__(engine, self._submit)
        self.engine: EngineEstimates = engine
        self.prompts = list(prompts)
        self.several = several
        self.edits = edits
        self.watch = watch
        self.settings = dict(settings)
        self.outputs: list[Any] = []
        self.names: tuple[str, ...] = ()
        self.estimate: Estimate | None = None
        self.estimating = estimating
        self.save_check = save_check
        self.live: View | None = None
        self._view = live
        #: The call may save too much, so it waits for a look at that.
        self._unchecked = False
        self._call: Call | None = None
        self._scoped: EditVersion | None = None
        self._installing: Future[list[Any]] | None = None
        self._mediators: list[Mediator] = []

    @property
    def steps(self) -> RanSteps | None:
        """How the steps of its request ran, of several requests that with the most; None where not known."""
        return longest(output.steps for output in self.outputs)

    # -- the with statement --------------------------------------------------------------------

    def __enter__(self) -> LabTracer:
        # Spelled out: capture and the skip guard read the caller's frame at a fixed depth.
        keep_current(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        return self

    def __exit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        frame = self.info.frame if self.info is not None else None
        handled = bool(super().__exit__(*exception))
        if self._call is not None and self.estimating:
            try:
                self.estimate = self.engine.run_steps(self.engine.estimate_steps(self._call.requests))
            finally:
                self._leave()
            self._installed()
            self._forget()
        elif self._call is not None:
            try:
                if self._unchecked:
                    self.engine.submit_checked(self._call)
                self._look_on()
                self.engine.wait(self._call, self.watch)
                self._still_whole(Interrupted)
                self._leave()
                self._finish(frame)
            except BaseException as error:
                self._leave()
                self._looked_on(error)
                raise
            self._looked_on(None)
        return handled

    async def __aenter__(self) -> LabTracer:
        keep_current(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        return self

    async def __aexit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        frame = self.info.frame if self.info is not None else None
        handled = bool(super().__exit__(*exception))
        if self._call is not None and self.estimating:
            try:
                steps = self.engine.estimate_steps(self._call.requests)
                self.estimate = await self.engine.arun_steps(steps)
            finally:
                self._leave()
            self._installed()
            self._forget()
        elif self._call is not None:
            try:
                if self._unchecked:
                    await self.engine.asubmit_checked(self._call)
                self._look_on()
                await self.engine.await_(self._call, self.watch)
                self._still_whole(InterruptedTask)
                self._leave()
                self._finish(frame)
            except BaseException as error:
                self._leave()
                self._looked_on(error)
                raise
            self._looked_on(None)
        return handled

    def __await__(self) -> Any:
        """The outputs, as often as asked: they are there when the block has ended."""

        async def outputs() -> list[Any]:
            return self.outputs

        return outputs().__await__()

    def invoke(self, *prompt: Any, **settings: Any) -> LabInvoker:
        """``with tracer.invoke("…"):`` in a trace without a prompt: one request with a block of its own."""
        return LabInvoker(self, *prompt, **settings)

    @property
    def output(self) -> Any:
        """The first request's output."""
        if not self.outputs:
            raise RequestRefused("The trace has no output: it has not ended, or it failed.")
        return self.outputs[0]

    # -- from the block to requests ------------------------------------------------------------

    def _submit(self, _: Any) -> None:
        """Turn the captured block into requests and hand them over; nothing is awaited in between."""
        frame, code = self.info.frame, self.info.code
        chosen = self.engine.edits.chosen(self.edits)
        if not self.prompts:
            requests = self._invoked(frame, code)
        elif self.several:
            requests = self._over_all(frame, code, chosen)
        else:
            block = self._block(self.node, code, frame.f_globals, frame.f_locals)
            requests = [self.engine.request(self.prompts[0], self.settings, chosen, block)]
        watched = self._view is not None
        if watched:
            one_request(requests)
        self._call = Call(
            requests, live=watched or self.watch is not None, peeks=Peeks() if watched else None
        )
        if self.estimating:
            return
        self._unchecked = self.save_check and self.engine.may_exceed(requests)
        if not self._unchecked:
            self.engine.submit(self._call)

    def _over_all(self, frame: FrameType, code: CodeType, chosen: tuple[EditVersion, ...]) -> list[Any]:
        """Several prompts, one block: sent once, where the engine does not have it, and not with each."""
        block = self._block(self.node, code, frame.f_globals, frame.f_locals)
        self._scoped, self._installing = self.engine.scoped_edit(block)
        versions = (*chosen, self._scoped)
        return [self.engine.request(prompt, self.settings, versions) for prompt in self.prompts]

    def _invoked(self, frame: FrameType, code: CodeType) -> list[Any]:
        """Run the body in the kernel to collect its ``tracer.invoke`` blocks, each one request."""
        interleaver = self.envoy.interleaver
        self.batcher = invokes = Invokes()
        # The tree's interleaver collects the invokes: one trace at a time, whatever the thread.
        _collecting.acquire()
        try:
            try:
                exec(code, Scope(dict(frame.f_locals), shared_locals(frame), frame.f_globals))
            except ValueError as error:
                # A body that reads the model at once was written for a prompt, and there is none.
                if interleaver.mediators or "outside of interleaving" not in str(error):
                    raise
            self._mediators = list(interleaver.mediators)
            if not self._mediators:
                raise RequestRefused(
                    'The trace has no prompt: write `%%trace "prompt"`, or `with tracer.invoke("prompt"):` '
                    "in it."
                )
            requests = []
            for mediator, (inputs, own) in zip(self._mediators, invokes.given, strict=True):
                settings = {**self.settings, **own}
                chosen = self.engine.edits.chosen(settings.pop("edits", self.edits))
                block = self._block(mediator.node, mediator.code, mediator.glbls, mediator.lcls)
                mediator.presaved = set(block.presaved)
                requests.append(self.engine.request(inputs[0], settings, chosen, block))
            return requests
        finally:
            interleaver.cancel()
            clear_shared_locals()
            _collecting.release()

    # -- watched -------------------------------------------------------------------------------

    def _look_on(self) -> None:
        if self._view is not None:
            assert self._call is not None
            self.live = self._view()
            self.live.begins(Feed(self.engine, self._call))
            self.live.display()

    def _looked_on(self, error: BaseException | None) -> None:
        if self.live is not None:
            self.live.ends(error)

    def _still_whole(self, interrupted: type[Interrupted]) -> None:
        """What was stopped in its view has no saves: the cell ends there, as if it had been interrupted."""
        __tracebackhide__ = True
        if self._call is not None and self._call.aborted.is_set():
            raise interrupted("the request was stopped in its view; the engine is still loaded.")

    # -- and back ------------------------------------------------------------------------------

    def _leave(self) -> None:
        scoped, self._scoped = self._scoped, None
        if scoped is not None:
            self.engine.drop(scoped)

    def _installed(self) -> None:
        """Say so where the workers could not read the block, and not what followed from it."""
        __tracebackhide__ = True
        if self._installing is not None:
            self._installing.result()

    def _forget(self) -> None:
        self._call = None
        self._mediators = []
        self.backend = None  # bound to this very object: a cycle that would keep the saves alive

    def _finish(self, frame: FrameType | None) -> None:
        """Bind what was saved in the user's frame, then raise what went wrong."""
        __tracebackhide__ = True
        call, self._call = self._call, None
        assert call is not None
        self._installed()
        self.outputs = self.engine.outputs(call)
        values = self._values()
        self.names = tuple(values)
        if frame is not None:
            _bind(frame, values)
        self._forget()
        self.engine.raise_errors(call, self.outputs)
        if frame is not None:
            self._say_unkept(frame, self.names)

    def _values(self) -> dict[str, Any]:
        """What to bind: a value, or a list of them where several requests or sequences saved it."""
        if self.several:
            names = dict.fromkeys(name for output in self.outputs for name in output.saves.trace)
            return {name: [_of(output, name) for output in self.outputs] for name in names}
        found: dict[str, list[Any]] = {}
        for output in self.outputs:
            for completion in output.outputs:
                for name, value in completion.saves.trace.items():
                    found.setdefault(name, []).append(value)
        return {**{name: _one(values) for name, values in found.items()}, **self._shared()}

    def _shared(self) -> dict[str, Any]:
        """Names saved above the invokes are one object in the kernel, so their copies are merged."""
        if len(self._mediators) < 2:
            return {}
        from nnsight.modeling.vllm.collect import merge_shared_saves

        copies = [dict(output.saves.trace) for output in self.outputs]
        appended: dict[str, list[Any]] = {}
        for name in {name for mediator in self._mediators for name in mediator.presaved}:
            before = next(m.lcls[name] for m in self._mediators if name in m.lcls)
            for saves in copies:
                # nnsight merges slot by slot, so of two requests that each append it would keep one.
                if isinstance(before, list) and isinstance(saves.get(name), list):
                    appended.setdefault(name, []).extend(saves[name][len(before) :])
                    saves[name] = saves[name][: len(before)]
        merged: dict[str, Any] = merge_shared_saves(self._mediators, copies)
        return {
            name: value + appended.get(name, []) if name in appended else value
            for name, value in merged.items()
        }


def _bind(frame: FrameType, values: dict[str, Any]) -> None:
    """Bind names in the user's frame, and keep no second reference there.

    Before Python 3.13 a function's frame keeps the dictionary its locals were last copied into: a
    gigabyte that the user deletes would live on in it until the function returns.
    """
    push(frame, values)
    if sys.version_info < (3, 13) and frame.f_locals is not frame.f_globals:
        copied = frame.f_locals
        for name in values:
            copied.pop(name, None)


def _of(output: Any, name: str) -> Any:
    """A name's value on one output: a list where it has several sequences, None where it saved none."""
    if len(output.outputs) > 1:
        return [completion.saves.trace.get(name) for completion in output.outputs]
    return output.saves.trace.get(name)


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


class EditTracer(_LabTracer):
    """An edit: a block that stays on the engine. ``with lab.edit("probe") as (tracer, edit):``."""

    def __init__(self, engine: EngineService, edit: Edit) -> None:
        super().__init__(engine, self._prepare)
        self.edit = edit
        self._version: EditVersion | None = None
        self._source = ""

    def __enter__(self) -> tuple[EditTracer, Edit]:
        # Spelled out: capture and the skip guard read the caller's frame at a fixed depth.
        keep_current(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        return self, self.edit

    async def __aenter__(self) -> tuple[EditTracer, Edit]:
        keep_current(sys._getframe(1))
        self.capture()
        if skippable(self.node):
            skip_context(self)
        return self, self.edit

    def __exit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        handled = bool(super().__exit__(*exception))
        if self._version is not None:
            for method, args in self.engine.edits.install_steps(self.edit, self._version, self._source):
                self.engine.rpc(method, *args)
        return handled

    async def __aexit__(self, *exception: Any) -> bool:
        __tracebackhide__ = True
        handled = bool(super().__exit__(*exception))
        if self._version is not None:
            for method, args in self.engine.edits.install_steps(self.edit, self._version, self._source):
                await self.engine.arpc(method, *args)
        return handled

    def _prepare(self, _: Any) -> None:
        if not skippable(self.node):
            raise EditRefused(
                f"The block of edit {self.edit.name!r} is empty, so there is nothing to install."
            )
        frame, code = self.info.frame, self.info.code
        block = self._block(self.node, code, frame.f_globals, frame.f_locals)
        self._source = block.text
        self._version = self.engine.version_of(self.edit.name, block)
        self._say_unkept(frame)

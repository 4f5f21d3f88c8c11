"""An engine of this kernel, as its users see it: trace, edit, generate, stream.

Twins are spelled ``x`` and ``ax``; both work on either kind of engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, overload

from nnsight_lab.engine.call import Call
from nnsight_lab.engine.declaring import Declaring
from nnsight_lab.engine.edits import Edit
from nnsight_lab.engine.estimating import EngineEstimates
from nnsight_lab.engine.feed import one_request
from nnsight_lab.engine.looking import Looking
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.engine.sampling import prompt_list
from nnsight_lab.engine.stream import Stream
from nnsight_lab.engine.tracer import EditTracer, LabTracer, Watcher
from nnsight_lab.errors import RequestRefused
from nnsight_lab.steps.step import Step
from nnsight_lab.wire.keys import COUNT

#: The room above this one that shows runs as they go: named, not imported, as the workers are.
_VIEWS = "nnsight_lab.runs"

#: Settings of a request that are not vLLM's sampling.
_OWN_SETTINGS = ("lora_request", "save_budget")


class Engine(Looking, EngineEstimates, Declaring):
    """A vLLM engine, wherever it runs.

    Made by `nnsight_lab.start`; use it as ``with engine.trace(prompt):``, ``with
    engine.edit("probe") as (tracer, edit):`` and ``engine.generate(prompts)``.
    """

    def trace(
        self,
        *prompts: Any,
        edits: Sequence[str] | None = None,
        watch: Watcher | None = None,
        live: Any = False,
        estimate: bool = False,
        save_check: bool = True,
        **sampling: Any,
    ) -> LabTracer:
        """A block that runs inside the forward passes of ``prompts``: ``with engine.trace("…") as tracer:``.

        What the block marks with ``.save()`` is bound in the surrounding scope when it ends: one
        value for one prompt, a list in prompt order for a list of prompts. Each prompt has the values that
        the block reads to itself: what it changes in them stays with that prompt. Without a prompt, write
        ``with tracer.invoke("…"):`` blocks inside.

        Args:
            *prompts: Text, token ids, one of vLLM's prompt dictionaries, or a list of them.
            edits: Which edits these requests run, in that order; else ``engine.default_edits``, else all
                that are on.
            watch: Called in this thread, at most 20 times a second, with the requests as they stand.
            live: True shows, in a notebook, the tokens of one prompt as they come, and the lists that the
                block appends to at every step as growing heatmaps; ``tracer.live`` is the view. A score, as
                for `live`, colours the tokens by it.
            estimate: Run the block on a few requests of at most 64 tokens only, to see what it would save:
                ``tracer.estimate``. Nothing is bound and no prompt is run.
            save_check: Of a call over several prompts: measure the block first where it may save more than
                is left, and stop it where it would. False leaves that to the worker.
            **sampling: vLLM's ``SamplingParams``; and ``save_budget="100MB"``, past which the request
                fails instead of bringing its saves home.

        Raises:
            TraceError: When the block fails in the worker, at the block's own line.
            RequestRefused, UnknownEdit, NotPicklable: Before anything is submitted.
            OverBudget: Before anything is submitted, when the call would save more than is left; or by the
                worker, when it did.
        """
        __tracebackhide__ = True
        self._require()
        listed, several = prompt_list(prompts)
        self.edits.chosen(edits)
        self.sampling({k: v for k, v in sampling.items() if k not in _OWN_SETTINGS})
        view = None
        if live is not False and live is not None and not estimate:
            if several or sampling.get("n", 1) != 1:
                raise RequestRefused("live= shows one answer to one prompt: give one prompt, and no n=.")
            views = importlib.import_module(_VIEWS)
            if views.wants_logprobs(live):
                sampling.setdefault("logprobs", 0)
            view = partial(views.LiveView, live)  # made when there is something to see
        return LabTracer(
            self,
            listed,
            several=several,
            edits=edits,
            watch=watch,
            settings=sampling,
            estimating=estimate,
            save_check=save_check,
            live=view,
        )

    @overload
    def edit(self, name: str | None = None, *, steps: None = None, **unknown: Any) -> EditTracer: ...

    @overload
    def edit(self, name: str | None = None, *, steps: Sequence[Step], **unknown: Any) -> Edit: ...

    def edit(
        self, name: str | None = None, *, steps: Sequence[Step] | None = None, **unknown: Any
    ) -> EditTracer | Edit:
        """A block that stays on the engine: ``with engine.edit("probe") as (tracer, edit):``.

        Every request that names it, or names no edits while it is on, gets a run of the block of its
        own; what it saves is on that request's output, ``output.saves["hidden"]``. Running it again
        under the same name replaces it; requests in flight keep the version they came with.

        Without code: ``engine.edit("steer", steps=[lab.steps.add("model.layers.5", vector)])`` installs the
        steps at once and returns the edit; see `nnsight_lab.steps`. An engine of level ``strict`` takes
        these only.

        Args:
            name: What requests call it by.
            steps: What it does, as data; then there is no block.
            **unknown: Refused.

        Raises:
            EditRefused: When the name is missing or cannot be one, or the steps do not fit the model.
        """
        __tracebackhide__ = True
        self._require()
        if unknown:
            raise RequestRefused(
                f"{next(iter(unknown))!r} is not an option of an edit; it takes a name, and steps= where it "
                "has no block."
            )
        if steps is not None:
            return self.install_declared(name, steps)
        return EditTracer(self, self.edits.declared(name))

    async def aedit(self, name: str, *, steps: Sequence[Step]) -> Edit:
        """`edit` with ``steps=``, awaited."""
        __tracebackhide__ = True
        self._require()
        return await self.ainstall_declared(name, steps)

    def generate(
        self,
        *prompts: Any,
        edits: Sequence[str] | None = None,
        watch: Watcher | None = None,
        errors: str = "raise",
        save_check: bool = True,
        **sampling: Any,
    ) -> list[Any]:
        """Run prompts, with the edits chosen, and return vLLM's outputs in prompt order.

        Args:
            *prompts: As for `trace`.
            edits: As for `trace`.
            watch: As for `trace`.
            errors: ``"raise"`` a failed edit after all requests are done (the error has
                ``.outputs``), or ``"keep"`` it on ``output.error``.
            save_check: As for `trace`.
            **sampling: vLLM's ``SamplingParams``.

        Returns:
            ``RequestOutput`` of each prompt; ``output.saves`` and ``output.outputs[i].saves`` hold
            what the edits saved for it.

        Raises:
            EditError: When an edit's block failed, once, with a count.
            OverBudget: As for `trace`.
        """
        __tracebackhide__ = True
        call = self._generation(prompts, edits, watch, errors, sampling)
        if save_check and self.may_exceed(call.requests):
            self.submit_checked(call, own_budgets=errors == "raise")
        else:
            self.submit(call)
        self.wait(call, watch)
        return self._generated(call, errors)

    async def agenerate(
        self,
        *prompts: Any,
        edits: Sequence[str] | None = None,
        watch: Watcher | None = None,
        errors: str = "raise",
        save_check: bool = True,
        **sampling: Any,
    ) -> list[Any]:
        """`generate`, awaited: other tasks of the caller's loop go on meanwhile."""
        __tracebackhide__ = True
        call = self._generation(prompts, edits, watch, errors, sampling)
        if save_check and self.may_exceed(call.requests):
            await self.asubmit_checked(call, own_budgets=errors == "raise")
        else:
            self.submit(call)
        await self.await_(call, watch)
        return self._generated(call, errors)

    def stream(self, *prompts: Any, edits: Sequence[str] | None = None, **sampling: Any) -> Stream:
        """Outputs as they grow: ``async for output in engine.stream("…")`` (or a plain ``for``).

        Each item is a ``RequestOutput`` with all the text so far; with several prompts
        ``output.index`` says whose. The finished one carries ``.saves``. Leaving the loop early
        aborts the request.
        """
        listed, _ = prompt_list(prompts)
        if not listed:
            raise RequestRefused('There is no prompt: engine.stream("…").')
        chosen = self.edits.chosen(edits)
        return Stream(self, Call([self.request(p, sampling, chosen) for p in listed], live=True))

    def live(
        self,
        *prompts: Any,
        score: Any = "logprob",
        edits: Sequence[str] | None = None,
        title: str = "",
        **sampling: Any,
    ) -> Any:
        """Run one prompt and watch it: a token strip that grows, and what edits save step by step.

        It begins at once, and the cell need not wait: ``run = engine.live("…", max_tokens=200)``. As a
        cell's last expression it shows itself; ``await run`` or ``run.wait()`` gives the output, ``async for
        output in run`` (or ``for``) gives it as it grows. ``run.strip.position`` is the token that is chosen;
        ``run.stop()`` and the view's button abort it. At most twenty updates a second reach a page.

        Args:
            *prompts: One, as for `trace`.
            score: What tokens are coloured by: ``"logprob"`` (natural), ``"probability"``, ``"rank"``, the
                name of a list that an edit saves and appends a number or a short vector to at every step, or
                a list of these for a row each. Saved lists that are no score become growing heatmaps.
            edits: As for `trace`.
            title: Above the tokens.
            **sampling: vLLM's ``SamplingParams``.

        Returns:
            `nnsight_lab.runs.LiveRun`.

        Raises:
            RequestRefused: There is not one prompt, or no such score.
        """
        __tracebackhide__ = True
        self._require()
        listed, several = prompt_list(prompts)
        if several or not listed or sampling.get("n", 1) != 1:
            raise RequestRefused('A live run is one answer to one prompt: engine.live("…", max_tokens=200).')
        chosen = self.edits.chosen(edits)
        views = importlib.import_module(_VIEWS)
        if views.wants_logprobs(score):
            sampling.setdefault("logprobs", 0)
        request = self.request(listed[0], sampling, chosen)
        one_request([request])
        run = views.LiveRun(self, score, title)
        try:
            run.start(Call([request], live=True, peeks=Peeks() if request.has_blocks else None))
        except BaseException:
            run.close()
            raise
        return run

    def _generation(
        self,
        prompts: Sequence[Any],
        edits: Sequence[str] | None,
        watch: Watcher | None,
        errors: str,
        sampling: Mapping[str, Any],
    ) -> Call:
        __tracebackhide__ = True
        if errors not in ("raise", "keep"):
            raise RequestRefused(f'errors={errors!r} is neither "raise" nor "keep".')
        listed, _ = prompt_list(prompts)
        if not listed:
            raise RequestRefused('There is no prompt: engine.generate("…") or engine.generate([…]).')
        chosen = self.edits.chosen(edits)
        return Call([self.request(p, sampling, chosen) for p in listed], live=watch is not None)

    def _generated(self, call: Call, errors: str) -> list[Any]:
        __tracebackhide__ = True
        outputs = self.outputs(call)
        if errors == "raise":
            self.raise_errors(call, outputs)
        return outputs

    def request_count(self) -> int:
        """How many requests with blocks the workers still track; 0 when nothing runs."""
        return max(self.rpc(COUNT), default=0)


class LocalEngine(Engine):
    """One vLLM engine of this process."""

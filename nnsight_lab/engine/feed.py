"""A running request, as a live view sees it: its tokens, what it saved so far, how it stands; and its abort.

A view runs on threads of its own and must not slow the engine down, so it asks for what there is now,
which costs a few references; nothing is pushed at it. Events of a view enter the engine through the driver,
which has a thread of its own: from a cell, a widget's callback and a subshell alike.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nnsight_lab.engine.peeks import Watched
from nnsight_lab.errors import LabError, RequestRefused

if TYPE_CHECKING:
    from nnsight_lab.engine.call import Call, LabRequest
    from nnsight_lab.engine.service import EngineService


class Seen(NamedTuple):
    """What there is of a request.

    Attributes:
        prompt_ids: Empty before the engine has begun.
        token_ids: Of its first sequence.
        logprobs: Of each token its log probability; shorter where they were not asked for.
        ranks: Of each token its rank, from 1.
        watched: The lists it saves, as far as they were seen; all of them, once it is home.
        finished: Whether the engine says that it is done.
        reason: Why, in vLLM's word.
    """

    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    ranks: tuple[float, ...] = ()
    watched: tuple[Watched, ...] = ()
    finished: bool = False
    reason: str = ""


class View(Protocol):
    """What shows a run to somebody (`nnsight_lab.runs.LiveView`, of the room above)."""

    def begins(self, feed: Feed) -> None: ...
    def ends(self, error: BaseException | None = None) -> None: ...
    def display(self) -> None: ...


class Feed:
    """What a view knows of one call.

    Args:
        engine: Whose call it is.
        call: Of one request.
    """

    def __init__(self, engine: EngineService, call: Call) -> None:
        self._engine = engine
        self._call = call
        self.tokenizer = engine.tokenizer

    def seen(self) -> Seen:
        """What there is now."""
        output, peeks = self._call.requests[0].output, self._call.peeks
        watched = () if peeks is None else peeks.watched()
        if output is None or not output.outputs:
            return Seen(watched=watched)
        completion = output.outputs[0]
        ids = tuple(completion.token_ids)
        found = [step.get(one) for step, one in zip(completion.logprobs or (), ids, strict=False)]
        return Seen(
            tuple(output.prompt_token_ids or ()),
            ids,
            tuple(math.nan if one is None else float(one.logprob) for one in found),
            tuple(math.nan if one is None or one.rank is None else float(one.rank) for one in found),
            self._home(watched),
            bool(output.finished),
            str(completion.finish_reason or ""),
        )

    @property
    def over(self) -> bool:
        """Whether nothing more will come: it is home, aborted, failed, or the engine is gone."""
        return self._call.future.done() or self._engine.died() is not None

    @property
    def stopped(self) -> bool:
        """Whether it was aborted."""
        return self._call.aborted.is_set()

    def wait(self, timeout_s: float) -> None:
        """Until it is over, or the time is."""
        concurrent.futures.wait([self._call.future], timeout=timeout_s)

    def stop(self) -> None:
        """Abort it; not waited for."""
        if not self._call.future.done():
            self._engine.abort(self._call)

    def failure(self) -> BaseException | None:
        """What went wrong with it, once it is over."""
        if self._call.future.done():
            return self._call.future.exception()
        return self._engine.died()

    def _home(self, watched: tuple[Watched, ...]) -> tuple[Watched, ...]:
        """The lists as they came home, in place of what was seen of them."""
        request = self._call.requests[0]
        if request.saves is None or self._call.peeks is None or not request.saves.sequences:
            return watched
        whole = {block.block: block.values for block in request.saves.sequences[0].blocks}
        seen = [(one.block, one.name) for one in watched]
        listed = [
            (block, name)
            for block, values in whole.items()
            for name, value in values.items()
            if type(value) is list and (block, name) not in seen and self._call.peeks.wants(name)
        ]
        return tuple(
            Watched(block, name, tuple(value))
            for block, name in [*seen, *listed]
            if type(value := whole.get(block, {}).get(name)) is list
        )


def one_request(requests: Sequence[LabRequest]) -> None:
    """Refuse what a live view cannot show, before it is submitted.

    Raises:
        RequestRefused: There are several prompts, or several answers to one.
    """
    if len(requests) != 1 or requests[0].params.n != 1:
        raise RequestRefused("A live view shows one answer to one prompt: give one prompt, and no n=.")


def blamed(error: BaseException) -> str:
    """An error in one line, for a view."""
    lines = str(error).strip().splitlines()
    return lines[0] if isinstance(error, LabError) and lines else f"{type(error).__name__}: {error}"

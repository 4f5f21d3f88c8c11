"""A call: the requests one caller submitted together, and what became of them.

Whatever drives vLLM, a caller waits on one future, may look at the outputs as they grow, and can
abort; so both drivers fill the same object, and waiting is written once.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nnsight_lab.wire.keys import SHARE_KEY

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from nnsight_lab.engine.edits import EditVersion
    from nnsight_lab.engine.homecoming import Parcels
    from nnsight_lab.engine.peeks import Peeks
    from nnsight_lab.wire.messages import RequestSaves


@dataclass(frozen=True)
class Progress:
    """One request as it stands, for a live view.

    Attributes:
        index: Its place in the call.
        prompt: Its prompt's text, or "" where it was given as token ids.
        text: What was generated so far (of the first sequence).
        tokens: How many tokens, over all its sequences.
        finished: Whether it is done.
        home_bytes: On a call's first request: what large replies of the call take that come over a network.
        brought_bytes: How much of that is here.
    """

    index: int
    prompt: str
    text: str
    tokens: int
    finished: bool
    home_bytes: int = 0
    brought_bytes: int = 0


@dataclass
class LabRequest:
    """One request of a call.

    Attributes:
        prompt: In any form vLLM takes.
        params: Its sampling settings; the blocks ride in ``extra_args``.
        edits: The edits it runs, in order.
        traced: Whether a trace's block rides it.
        source: The text of its trace's block; "" where none rides it.
        wants_result: Whether a block may read ``tracer.result``, so the record must go to the worker.
        output: The latest output; the finished one at the end.
        settings: The sampling settings that were given.
        content: What the workers call its trace's block by; "" where they do not keep it.
        block_source: The trace's block as it was written; its names that are modules in ``block_roots``.
        block_reach: What of the prompt the trace's block touches, a word of `nnsight_lab.wire.touch.Reach`.
        saves: What its blocks saved, once collected.
        parcels: By sequence and block, those of its saves that came through shared memory.
        shared: Whether its saves are to be mapped by somebody else; then ``ranks`` is what the workers said.
    """

    prompt: Any
    params: SamplingParams
    edits: tuple[EditVersion, ...] = ()
    traced: bool = False
    wants_result: bool = False
    source: str = ""
    lora_request: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    content: str = ""
    block_source: str = ""
    block_roots: tuple[tuple[str, str], ...] | None = None
    block_reach: str = "prompt"
    id: str = field(default_factory=lambda: f"lab-{uuid.uuid4().hex[:16]}")
    output: RequestOutput | None = None
    saves: RequestSaves | None = None
    parcels: Parcels = field(default_factory=dict)
    shared: bool = False
    ranks: tuple[RequestSaves, ...] = ()
    _completions: dict[int, Any] = field(default_factory=dict)

    @property
    def has_blocks(self) -> bool:
        """Whether the worker tracks it."""
        return self.traced or bool(self.edits)

    @property
    def text(self) -> str:
        """Its prompt, where that was given as text; else ""."""
        prompt = self.prompt.get("prompt") if isinstance(self.prompt, Mapping) else self.prompt
        return prompt if isinstance(prompt, str) else ""

    def share(self, share: str) -> None:
        """Have its saves go to memory of their own owner's, for somebody to map."""
        if self.has_blocks:
            self.shared = True
            self.params.extra_args = {**(self.params.extra_args or {}), SHARE_KEY: share}

    def update(self, output: RequestOutput) -> None:
        """Take the next output. One of a step may hold only the sequences that moved in it."""
        if self.params.n > 1:
            for completion in output.outputs:
                self._completions[completion.index] = completion
            output.outputs = [self._completions[i] for i in sorted(self._completions)]
        self.output = output

    def progress(self, index: int) -> Progress:
        """How it stands now."""
        output = self.output
        prompt = self.text
        if output is None:
            return Progress(index, prompt, "", 0, False)
        tokens = sum(len(c.token_ids) for c in output.outputs)
        text = output.outputs[0].text if output.outputs else ""
        return Progress(index, output.prompt or prompt, text, tokens, bool(output.finished))


@dataclass
class Call:
    """The requests one caller submitted together.

    Attributes:
        requests: In the caller's order.
        live: Whether outputs are wanted as they grow, not only at the end.
        future: Resolves to None when every request is finished and collected, or to the error.
        aborted: Set when the caller gave up.
        crowded: Whether others ran beside it, or what is left of an aborted one: its seconds say nothing.
        heard_out: At a server: whether its reader was sent all of it.
        given_up: At a server: whether its reader said that it wants no more.
        tells_steps: At a server: whether its reader knows of `RequestSaves.steps`.
        peeks: Where somebody watches what the first request saves: what was seen of it.
    """

    requests: Sequence[LabRequest]
    live: bool = False
    peeks: Peeks | None = None
    on_output: Callable[[int, RequestOutput], None] | None = None
    future: Future[None] = field(default_factory=Future)
    aborted: threading.Event = field(default_factory=threading.Event)
    crowded: bool = False
    heard_out: bool = False
    given_up: bool = False
    tells_steps: bool = True
    #: Bytes of large replies that were told of, and of those how many are here.
    home_bytes: int = 0
    brought_bytes: int = 0
    #: When it was submitted and over, by ``time.perf_counter()``, and the driver's ``home_s`` at submission.
    began: float = 0.0
    ended: float = 0.0
    home_s: float = 0.0

    def __post_init__(self) -> None:
        # A waiter that is cancelled must not cancel the call behind the driver's back.
        self.future.set_running_or_notify_cancel()

    def progress(self) -> list[Progress]:
        """Every request as it stands."""
        found = [request.progress(index) for index, request in enumerate(self.requests)]
        if self.home_bytes:
            found[0] = replace(found[0], home_bytes=self.home_bytes, brought_bytes=self.brought_bytes)
        return found

    def brought(self, nbytes: int) -> None:
        """Note bytes of a reply that arrived."""
        self.brought_bytes += nbytes

    def took(self, index: int, output: RequestOutput) -> None:
        """Note an output of request ``index``."""
        self.requests[index].update(output)
        if self.on_output is not None:
            self.on_output(index, output)

    def resolve(self, error: BaseException | None = None) -> None:
        """Finish the call, once; later words are ignored."""
        if self.future.done():
            return
        self.ended = time.perf_counter()
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

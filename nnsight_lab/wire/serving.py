"""What a kernel and a shared engine's server say to each other: routes, headers and messages.

A request goes as the codec's bytes; its block is a field of bytes that the server passes on and never
opens. A call is answered by frames, each the length of a message (u64, little endian) and the message, so
that outputs arrive as they grow and saves when they are there. No frame is long: a message of many bytes is
parked at the server, and the frame says under which name; so neither end allocates what the other one only
claims. Nothing here acts, and nothing is pickled: neither end can be made to run code by what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nnsight_lab.wire.messages import RequestSaves
from nnsight_lab.wire.registry import register

#: Raised by one where an older other side would misread what is said.
PROTOCOL = 3

PREFIX = "/v1/lab"
#: What a codec message is called in ``Content-Type``.
CONTENT_TYPE = "application/x-nnsight-lab"
#: Header of a call, and what may stand in it: that the kernel knows of messages with `RequestSaves.steps`.
TAKES = "x-nnsight-lab-takes"
TAKES_STEPS = "steps"
FRAME_BYTES = 8
#: A message longer than this is parked; up to so much of it, before its tensors, rides the frame.
PARK_BYTES = 2**20
HEAD_BYTES = 4 * PARK_BYTES
#: No frame is longer, whatever it says.
FRAME_MOST = 8 * PARK_BYTES
#: What is fetched of a parked message at a time, and the most that is given at a time.
PIECE_BYTES = 64 * 2**20
#: Of a request to the server, the part that becomes Python objects, roughly twenty times as large.
ASKED_HEADER_BYTES = 16 * 2**20

#: In an OpenAI client's ``extra_body={"vllm_xargs": {…}}``: the names of the edits a request runs.
OPENAI_EDITS = "nnsight_edits"

#: How far the users of a server are trusted, in words.
LEVELS = {
    "solo": "one user; blocks are Python in the worker",
    "team": "users who trust each other; blocks are Python in the worker, which all of them share",
    "strict": "edits are data (steps=); no code of a user's runs",
}
#: What the shared engine is called as a JupyterHub service, where nobody says otherwise.
HUB_SERVICE = "nnsight-lab"

#: How often a kernel says that it is still there, and how long an edit outlives the last time (seconds).
RENEW_S = 5.0
LEASE_S = 20.0


@register
@dataclass(frozen=True)
class EngineFacts:
    """What a kernel must know of an engine whose configuration it does not have.

    Attributes:
        model: As the engine was started with.
        device: ``cpu`` or ``cuda``.
        dtype: Of the weights, as ``bfloat16``.
        itemsize: Bytes of one value of that dtype.
        context: Tokens of the longest request.
        layers: Decoder layers.
        hidden: Size of the residual stream.
        at_once: Sequences that run together.
        block_size: Tokens of one block of the KV cache.
        kv_blocks: How many blocks there are.
        tensor_parallel: Ranks that share each layer.
        pipeline_parallel: Stages the layers are divided into.
        prefix_caching: Whether the prefix cache is on.
        step_tokens: Tokens of the longest prompt that runs in one step; 0 for any.
        sleep_mode: Whether it can sleep.
        vocabulary: Rows of the unembedding.
        head_size: Of one attention head.
    """

    model: str
    device: str
    dtype: str
    itemsize: int
    context: int
    layers: int
    hidden: int
    at_once: int
    block_size: int
    kv_blocks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefix_caching: bool = False
    sleep_mode: bool = False
    vocabulary: int = 0
    head_size: int = 0
    step_tokens: int = 0


@register
@dataclass(frozen=True)
class ModuleSeen:
    """One module of the served model.

    Attributes:
        path: Within the model; ``""`` is the model itself.
        kind: Its class's name.
        parameters: ``(name, shape, dtype)`` of those that are its own.
    """

    path: str
    kind: str
    parameters: tuple[tuple[str, tuple[int, ...], str], ...] = ()


@register
@dataclass(frozen=True)
class Served:
    """What a server says of itself and of its model, once, to a kernel that attaches.

    Attributes:
        protocol: `PROTOCOL` of the server.
        versions: Of ``nnsight_lab``, ``nnsight``, ``vllm``, ``torch`` and Python, by name.
        level: How far users are kept apart: ``solo``, ``team`` or ``strict``.
        user: Who the server takes the asker for.
        admin: Whether they may publish edits.
        facts: The engine's.
        modules: The model's, parents before children.
        sampling: The names of sampling settings.
        tokenizer: The tokenizer's files, by name.
        saved_bytes: What the blocks of one request may save.
        requests: How many one user may have at once; a longer call is sent in pieces. 0 where nobody said.
        door: Where a kernel on the same machine asks for the memory that saves are in; "" where they travel.
        jail: What the workers' jail is, in one line.
    """

    protocol: int
    versions: dict[str, str]
    level: str
    user: str
    admin: bool
    facts: EngineFacts
    modules: tuple[ModuleSeen, ...]
    sampling: tuple[str, ...]
    tokenizer: dict[str, bytes] = field(default_factory=dict)
    saved_bytes: int = 0
    requests: int = 0
    door: str = ""
    jail: str = ""


@register
@dataclass(frozen=True)
class EditAsked:
    """An edit to install.

    Attributes:
        id: As its owner's requests name it; another owner's may be called the same.
        name: What people and OpenAI clients call it.
        payload: The block, for the workers; opaque to the server.
        lease: What it belongs to.
        scoped: Whether it is a trace's block, for one call's requests only.
        declared: Whether it is data, which the server checks, and no code.
        reach: What of a prompt it touches, as its kernel read it; of data the server reads that itself.
    """

    id: str
    name: str
    payload: bytes
    lease: str
    scoped: bool = False
    declared: bool = False
    reach: str = "prompt"


@register
@dataclass(frozen=True)
class RequestAsked:
    """One request of a call.

    Attributes:
        id: Unique among its owner's.
        prompt: Text, token ids, or one of vLLM's prompt dictionaries.
        settings: Sampling settings.
        edits: Ids of installed edits, in the order they run.
        block: The block of a trace; opaque to the server.
        declared: A block of this package's own, as data.
        save_budget: Bytes its blocks may save; None where nobody said.
        wants_result: Whether a block may read ``tracer.result``.
        lora: The name of a LoRA that is served; "" for none.
        reach: What of its prompt the block of a trace touches, as its kernel read it.
    """

    id: str
    prompt: Any
    settings: dict[str, Any] = field(default_factory=dict)
    edits: tuple[str, ...] = ()
    block: bytes | None = None
    declared: bytes | None = None
    save_budget: int | None = None
    wants_result: bool = False
    lora: str = ""
    reach: str = "prompt"


@register
@dataclass(frozen=True)
class CallAsked:
    """Requests that were submitted together.

    Attributes:
        id: Unique among its owner's; for aborting it.
        lease: What it belongs to.
        requests: In the caller's order.
        live: Whether outputs are wanted as they grow.
        returned: Pieces of memory that the kernel looks at no more, encoded.
    """

    id: str
    lease: str
    requests: tuple[RequestAsked, ...]
    live: bool = False
    returned: bytes = b""


@register
@dataclass(frozen=True)
class TokenSeen:
    """What was said of one token: its natural log probability, its rank, and its text."""

    logprob: float
    rank: int | None = None
    text: str | None = None


@register
@dataclass(frozen=True)
class CompletionSeen:
    """One completion as it stands; fields as in vLLM's ``CompletionOutput``."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, TokenSeen], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@register
@dataclass(frozen=True)
class OutputSeen:
    """A request as it stands; fields as in vLLM's ``RequestOutput``.

    Attributes:
        place: Its place in the call.
        completions: As many as were asked for.
        num_cached_tokens: Of the prompt, those that were served from the prefix cache.
    """

    place: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    completions: tuple[CompletionSeen, ...]
    finished: bool
    prompt_logprobs: tuple[dict[int, TokenSeen] | None, ...] | None = None
    num_cached_tokens: int | None = None


@register
@dataclass(frozen=True, eq=False)
class SavesSeen:
    """What a finished request's blocks saved; the last word of a request that had blocks."""

    place: int
    saves: RequestSaves | None


@register
@dataclass(frozen=True)
class CallOver:
    """The last frame of a call.

    Attributes:
        error: Why it failed, in a `LabError`'s class name; "" where it did not.
        text: The same in words.
    """

    error: str = ""
    text: str = ""


@register
@dataclass(frozen=True)
class Parked:
    """A message that was too large for a frame: it waits at the server, and is fetched in pieces.

    Attributes:
        id: Under which it waits, among what hangs on the asker's lease.
        nbytes: Its length.
        head_bytes: How many of them precede its tensors' bytes: all that labels need.
        head: Those bytes, where they are few; else they are fetched first.
    """

    id: str
    nbytes: int
    head_bytes: int
    head: bytes = b""


@register
@dataclass(frozen=True, eq=False)
class SavesHere:
    """`SavesSeen` for a kernel on the server's machine: large values stay where the workers put them.

    Attributes:
        place: Its request's place in the call.
        ranks: What each rank collected; of a packed value, the path of its extent is what the slab is called
            at the server's door.
    """

    place: int
    ranks: tuple[RequestSaves, ...]

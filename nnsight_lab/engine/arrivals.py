"""Finished requests on their way into the engine's store: what they saved, and what is known of them.

This is on the way of every call, so it only gathers references; what a label says (the prompt's text, the
sampling, where in the model a value was read) is found out when somebody asks for it.
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nnsight_lab.blocks.module_paths import module_paths
from nnsight_lab.saves.arrival import Arrival, Fields, Inline
from nnsight_lab.saves.held import Blocks
from nnsight_lab.wire.keys import TRACE_BLOCK

if TYPE_CHECKING:
    from nnsight_lab.engine.call import Call, LabRequest
    from nnsight_lab.engine.config import EngineConfig

_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_PLAIN = (bool, int, float, str, type(None))


class Origin:
    """What all requests of an engine share: model, revision, versions, tokenizer.

    Args:
        engine: The engine's name.
        config: Its configuration.

    Attributes:
        tokenizer: For prompts that were given as token ids; None until the engine is up.
        versions: Of what computes; this process's own where it is None.
    """

    def __init__(self, engine: str, config: EngineConfig) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer: Any = None
        self.versions: Mapping[str, str] | None = None
        self._lock = threading.Lock()
        self._own_tokenizer: Any = None
        self._fields: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """The label fields that follow from the engine."""
        if self._fields is None:
            self._fields = {
                "engine": self.engine,
                "model": self.config.model,
                "model_revision": revision_of(self.config.model, dict(self.config.options)),
                "versions": self.versions or _versions(),
            }
        return self._fields

    def text_of(self, ids: Sequence[int] | None) -> str:
        """The text of a prompt that was given as token ids; "" where there is no telling."""
        if not ids or self.tokenizer is None:
            return ""
        with self._lock:
            try:
                if self._own_tokenizer is None:
                    # A fast tokenizer refuses a second thread, and vLLM's own may be the first.
                    self._own_tokenizer = copy.deepcopy(self.tokenizer)
                return str(self._own_tokenizer.decode(list(ids)))
            except Exception:  # a label's field is not worth a request
                return ""


def _versions() -> dict[str, str]:
    import nnsight
    import vllm  # a request of it is home, so both are loaded

    return {
        "nnsight_lab": metadata.version("nnsight-lab"),
        "nnsight": str(nnsight.__version__),
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
    }


class Ran(NamedTuple):
    """A block that ran on a request, as labels and `module_paths` know it."""

    name: str
    number: int
    source: str
    roots: tuple[tuple[str, str], ...] | None


class _Facts(NamedTuple):
    """What is known of one request, by reference."""

    origin: Origin
    prompt: str | None
    prompt_token_ids: Sequence[int] | None
    settings: Mapping[str, Any]
    blocks: tuple[Ran, ...]
    created: float

    def fields(self) -> Fields:
        """What its labels say."""
        prompt = self.prompt if self.prompt is not None else self.origin.text_of(self.prompt_token_ids)
        edits = [ran for ran in self.blocks if ran.name != TRACE_BLOCK]
        trace = next((ran.source for ran in self.blocks if ran.name == TRACE_BLOCK), "")
        common = {
            **self.origin.fields(),
            "prompt": prompt,
            "prompt_ids": tuple(self.prompt_token_ids or ()),
            "sampling": plain_sampling(self.settings),
            "edits": tuple((ran.name, ran.number, ran.source) for ran in edits),
            "block_source": trace,
            "created": self.created,
        }
        paths = {
            (ran.name, name): path
            for ran in self.blocks
            for name, path in module_paths(ran.source, ran.roots).items()
        }
        return Fields(common, paths)


class _Kept(NamedTuple):
    """What one block saved for one sequence: a piece that can be rebuilt."""

    sequence: int
    block: str
    value: Callable[[], dict[str, Any]]


class _Blocks(NamedTuple):
    """All that a request's blocks saved."""

    pieces: tuple[_Kept, ...]

    def rebuilt(self) -> Mapping[int, Blocks]:
        """By sequence, block and name; containers are new ones, tensors the same memory."""
        sequences: dict[int, dict[str, dict[str, Any]]] = {}
        for piece in self.pieces:
            blocks = sequences.setdefault(piece.sequence, {})
            blocks.setdefault(piece.block, {}).update(piece.value())
        return sequences


def arrivals(call: Call, origin: Origin) -> list[Arrival]:
    """The requests of a finished call that saved something, before the caller gets their values."""
    created = time.time()
    return [found for request in call.requests if (found := _arrival(request, origin, created)) is not None]


def _arrival(request: LabRequest, origin: Origin, created: float) -> Arrival | None:
    output, saves = request.output, request.saves
    if saves is None or output is None:
        return None
    pieces: list[_Kept] = []
    nbytes = 0
    for sequence in saves.sequences:
        for block in sequence.blocks:
            if not block.values:
                continue
            inline = block.values
            # The earliest rank's last: it wins where two have a name.
            for parcel in reversed(request.parcels.get((sequence.index, block.block), ())):
                # What came in the parcel is rebuilt from it; the rest rode the reply.
                inline = {name: inline[name] for name in inline if name not in parcel.names}
                pieces.append(_Kept(sequence.index, block.block, parcel.value))
                nbytes += parcel.nbytes
            if inline:
                kept = Inline(inline)
                pieces.append(_Kept(sequence.index, block.block, kept.value))
                nbytes += kept.nbytes
    if not pieces:
        return None
    request.parcels = {}
    blocks = tuple(Ran(v.name, v.number, v.source, v.roots) for v in request.edits)
    if request.traced:
        blocks = (*blocks, Ran(TRACE_BLOCK, 0, request.block_source, request.block_roots))
    prompt = output.prompt
    if prompt is None and request.text:
        prompt = request.text
    facts = _Facts(origin, prompt, output.prompt_token_ids, request.settings, blocks, created)
    return Arrival(request.id, nbytes, _Blocks(tuple(pieces)).rebuilt, facts.fields)


def plain_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The given sampling settings that differ from vLLM's defaults, as plain values."""
    # Loaded where a request of it is home; a kernel whose engine is elsewhere may have none.
    vllm = sys.modules.get("vllm")
    defaults = None if vllm is None else vllm.SamplingParams()
    found: dict[str, Any] = {}
    for name, value in settings.items():
        name = "max_tokens" if name == "max_new_tokens" else name
        if name == "extra_args" or (defaults is not None and value == getattr(defaults, name, None)):
            continue
        found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def revision_of(model: str, options: Mapping[str, Any]) -> str:
    """The commit of a model that lies in the Hugging Face cache; "" for any other. Asks nobody."""
    path: Any = Path(model).expanduser()
    if not path.exists():
        from huggingface_hub import try_to_load_from_cache  # whoever runs a model has it

        try:
            path = try_to_load_from_cache(model, "config.json", revision=options.get("revision"))
        except Exception:  # not an id
            return ""
    parts = Path(path).parts if isinstance(path, str | Path) else ()
    for before, name in itertools.pairwise(parts):
        if before == "snapshots" and _SNAPSHOT.fullmatch(name):
            return name
    return ""

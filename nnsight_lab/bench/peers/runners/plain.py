"""Plain vLLM with its defaults (CUDA graphs, compiled code): what the others are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_lab.bench.peers.runners.engines import Outputs, given, quiet, sampling
from nnsight_lab.bench.peers.runners.measuring import Call, Job, main
from nnsight_lab.bench.peers.works import NOTHING, STEER


class Plain:
    """vLLM's ``LLM``."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def cannot(self, what: str) -> str:
        if what == NOTHING:
            return ""
        return "changes nothing in a model" if what == STEER else "brings no values of a layer home"

    def note(self, what: str) -> str:
        return ""

    @contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Call]:
        params = sampling(new_tokens)
        yield lambda prompts: Outputs(self.llm.generate(given(prompts), params, use_tqdm=False))


@contextmanager
def build(job: Job) -> Iterator[Plain]:
    quiet()
    from vllm import LLM

    llm = LLM(job.model, **job.engine_options)
    yield Plain(llm)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main("vllm", build)

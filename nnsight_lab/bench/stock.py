"""The peers of a benchmark, each as it comes: plain vLLM, and nnsight alone.

Started in the same surroundings as our engine, so that nothing they print lands in the program's
output, and with the same options: eager, as nnsight runs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nnsight_lab import pins
from nnsight_lab.engine.config import OWN_OPTIONS
from nnsight_lab.engine.log import EngineLog
from nnsight_lab.engine.starting import surroundings

Generate = Callable[..., object]


@contextmanager
def plain_vllm(
    path: str,
    mode: str,
    options: dict[str, Any],
    sampling: Mapping[str, Any],
    *,
    as_it_comes: bool = False,
) -> Iterator[Generate]:
    """Plain vLLM: ``LLM`` or, for ``mode="async"``, ``AsyncLLM``.

    Args:
        path: The model.
        mode: ``sync`` or ``async``.
        options: vLLM engine options.
        sampling: Of every call that does not bring its own.
        as_it_comes: With vLLM's own defaults, CUDA graphs and compilation; else eager, as nnsight runs.
    """
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    options = _theirs(options)
    # Prompts are not cached either way: what is measured would be answered from the round before.
    settings: dict[str, Any] = {"enable_prefix_caching": False, **options}
    if not as_it_comes:
        settings = {"enforce_eager": True, "enable_chunked_prefill": False, **settings}
    with surroundings(f"bench-plain-{mode}", EngineLog.new("bench-plain"), options):
        if mode == "sync":
            llm = LLM(path, **settings)
        else:
            loop = asyncio.new_event_loop()

            async def build() -> Any:
                return AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **settings))

            engine = loop.run_until_complete(build())
    if mode == "sync":
        yield lambda texts, own=sampling: llm.generate(_given(texts), SamplingParams(**own), use_tqdm=False)
        llm.llm_engine.engine_core.shutdown()
        return

    async def one(text: Any) -> None:
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        async for _ in engine.generate(text, params, uuid.uuid4().hex):
            pass

    async def every(texts: list[Any]) -> None:
        await asyncio.gather(*(one(text) for text in texts))

    yield lambda texts: loop.run_until_complete(every(texts))
    engine.shutdown()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@contextmanager
def nnsight_alone(path: str, options: dict[str, Any]) -> Iterator[Any]:
    """Nnsight's own VLLM on its own engine; on a CPU with the least that lets it run there."""
    options = _theirs(options)
    from nnsight.modeling.vllm import VLLM
    from vllm.platforms import current_platform

    cpu = "nnsight_lab.bench.stock_worker.StockCPUWorker"

    class Stock(VLLM):
        _WORKER_CLS = cpu if current_platform.is_cpu() else VLLM._WORKER_CLS

        def _load_meta(self, *args: Any, **kwargs: Any) -> Any:
            with pins.meta_tree_on_cpu():
                return super()._load_meta(*args, **kwargs)

    with surroundings("bench-nnsight", EngineLog.new("bench-nnsight"), options):
        model = Stock(path, dispatch=True, **options)
    yield model
    model.vllm_entrypoint.llm_engine.engine_core.shutdown()


def _given(texts: list[Any]) -> list[Any]:
    return [{"prompt_token_ids": text} if isinstance(text, list) else text for text in texts]


def _theirs(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are vLLM's, not ours."""
    return {name: value for name, value in options.items() if name not in OWN_OPTIONS}

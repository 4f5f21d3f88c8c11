"""nnsight's own VLLM, with its defaults, which are eager: each kind of work is a registered edit.

On a CPU nnsight has no worker of its own; mixing its runner into vLLM's CPU worker is the least that lets
it run. Values are summed or cloned in the block, as nnsight asks: what it serves are views that later
layers overwrite.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_lab import pins
from nnsight_lab.bench.peers.runners.engines import Outputs, Saved, given, quiet, sampling
from nnsight_lab.bench.peers.runners.measuring import Call, Job, main, on_cuda
from nnsight_lab.bench.peers.works import ALL, LAST, NOTHING, SAVE, STEER, STRENGTH

#: The word after the job that asks for taps on the decoder layers, and with them CUDA graphs.
TAPS = "taps"


class NNsight:
    """nnsight's model on its own engine."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def cannot(self, what: str) -> str:
        return ""

    def note(self, what: str) -> str:
        return "" if on_cuda() else "on vLLM's CPU worker, which nnsight does not ship"

    @contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Call]:
        edit = self._edit(what, check) if what != NOTHING else None
        params = sampling(new_tokens)
        kind = Saved if edit is not None else Outputs
        llm = self.model.vllm_entrypoint
        yield lambda prompts: kind(llm.generate(given(prompts), params, use_tqdm=False))
        if edit is not None:
            edit.clear()

    def _edit(self, what: str, check: bool) -> Any:
        layers = self.model.model.layers
        middle, last = layers[len(layers) // 2], layers[-1]
        if what == SAVE:
            with self.model.edit() as (tracer, edit):
                out = middle.output
                kept = (out[0] + out[1]).save()
        elif what == ALL:
            with self.model.edit() as (tracer, edit):
                kept = list().save()  # type: ignore[attr-defined]  # noqa: C408
                for layer in layers:
                    out = layer.output
                    kept.append(out[0] + out[1])
        elif what == LAST:
            with self.model.edit() as (tracer, edit):
                kept = list().save()  # type: ignore[attr-defined]  # noqa: C408
                for layer in layers:
                    out = layer.output
                    kept.append(out[0][-1] + out[1][-1])
        elif what == STEER and check:
            with self.model.edit() as (tracer, edit):
                first = True
                for _ in tracer.all():
                    middle.output[0][:] += STRENGTH
                    if first:
                        out = last.output
                        kept = (out[0] + out[1]).save()
                        first = False
        else:
            with self.model.edit() as (tracer, edit):
                for _ in tracer.all():
                    middle.output[0][:] += STRENGTH
        return edit


@contextmanager
def build(job: Job) -> Iterator[NNsight]:
    quiet()
    from nnsight.modeling.vllm import VLLM

    worker = VLLM._WORKER_CLS if on_cuda() else "nnsight_lab.bench.stock_worker.StockCPUWorker"

    class Stock(VLLM):
        _WORKER_CLS = worker

        def _load_meta(self, *args: Any, **kwargs: Any) -> Any:
            with pins.meta_tree_on_cpu():
                return super()._load_meta(*args, **kwargs)

    taps = TAPS in sys.argv[2:]
    options = job.engine_options | ({"taps": ["model.layers.*.output"]} if taps else {})
    model = Stock(job.model, dispatch=True, **options)
    yield NNsight(model)
    model.vllm_entrypoint.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main("nnsight", build)

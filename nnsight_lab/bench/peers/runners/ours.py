"""nnsight-lab, with its defaults: each kind of work is an edit that stays on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_lab.bench.peers.runners.engines import Outputs, Saved
from nnsight_lab.bench.peers.runners.measuring import Call, Job, main
from nnsight_lab.bench.peers.works import ALL, LAST, NOTHING, SAVE, STEER, STRENGTH


class Ours:
    """An engine in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def cannot(self, what: str) -> str:
        return ""

    def note(self, what: str) -> str:
        return ""

    @contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Call]:
        edits = []
        if what != NOTHING:
            name = f"{what}_{'check' if check else 'timed'}"
            self._edit(name, what, check)
            edits = [name]
        sampling = {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        kind = Saved if edits else Outputs
        yield lambda prompts: kind(self.engine.generate(prompts, edits=edits, **sampling))
        for edit in edits:
            self.engine.edits[edit].clear()

    def _edit(self, name: str, what: str, check: bool) -> None:
        import nnsight_lab as lab

        layers = self.engine.model.model.layers
        middle, last = layers[len(layers) // 2], layers[-1]
        if what == SAVE:
            with self.engine.edit(name):
                kept = lab.residual(middle.output).save()
        elif what == ALL:
            with self.engine.edit(name):
                kept = list().save()  # type: ignore[attr-defined]  # noqa: C408
                for layer in layers:
                    kept.append(lab.residual(layer.output))
        elif what == LAST:
            with self.engine.edit(name):
                kept = list().save()  # type: ignore[attr-defined]  # noqa: C408
                for layer in layers:
                    kept.append(lab.residual(layer.output)[-1])
        elif what == STEER and check:
            with self.engine.edit(name) as (tracer, _):
                first = True
                for _ in tracer.all():
                    middle.output[0][:] += STRENGTH
                    if first:
                        kept = lab.residual(last.output).save()
                        first = False
        else:
            with self.engine.edit(name) as (tracer, _):
                for _ in tracer.all():
                    middle.output[0][:] += STRENGTH


@contextmanager
def build(job: Job) -> Iterator[Ours]:
    import nnsight_lab as lab

    engine = lab.start(job.model, name="peers", mode="sync", **job.engine_options)
    # As a loop would that needs no earlier call's saves: rounds are compared with rounds.
    engine.saves.max_requests = 0
    try:
        yield Ours(engine)
    finally:
        lab.stop(engine.name)


if __name__ == "__main__":
    main("nnsight-lab", build)

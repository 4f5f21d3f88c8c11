"""vllm-lens: a vLLM plugin; it has vLLM run eagerly, and what it saves comes home with the outputs.

Whole residual streams by its own ``output_residual_stream``, which takes the rows of new tokens along and
has no way to leave them; the last token's by a hook, since nothing else chooses rows; steering by its
``SteeringVector``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnsight_lab.bench.peers.runners.engines import Outputs, given, hidden_of, layers_of, quiet, sampling
from nnsight_lab.bench.peers.runners.measuring import Call, Job, main
from nnsight_lab.bench.peers.works import ALL, LAST, SAVE, STEER, STRENGTH


class Streams(Outputs):
    """Outputs with ``activations``, or with what the hook of the last token kept."""

    def __init__(self, outputs: list[Any], what: str) -> None:
        super().__init__(outputs)
        self._what = what

    def values(self, prompt: int) -> Any:
        import torch

        output = self.outputs[prompt]
        if self._what == LAST:
            kept = output.hook_results["0"]
            return torch.stack([kept[layer] for layer in sorted(kept)])
        found = getattr(output, "activations", None)
        if not found:
            return None
        streams = found["residual_stream"][:, : len(output.prompt_token_ids)]
        return streams if self._what == ALL else streams[0]


class VLLMLens:
    """vLLM's ``LLM`` under the plugin."""

    def __init__(self, llm: Any, layers: int, hidden: int) -> None:
        self.llm = llm
        self.layers = layers
        self.hidden = hidden

    def cannot(self, what: str) -> str:
        return ""

    def note(self, what: str) -> str:
        return "brings the new tokens' rows home too" if what in (SAVE,) else ""

    @contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Call]:
        asked: dict[str, Any] = {}
        if what == SAVE:
            asked["output_residual_stream"] = [self.layers // 2]
        elif what == ALL:
            asked["output_residual_stream"] = list(range(self.layers))
        elif what == LAST:
            asked["apply_hooks"] = [_last_rows(self.layers)]
        elif what == STEER:
            asked["apply_steering_vectors"] = [_steering(self.layers // 2, self.hidden)]
            if check:
                asked["output_residual_stream"] = [self.layers - 1]
        params = sampling(new_tokens, extra_args=asked or None)
        yield lambda prompts: Streams(self.llm.generate(given(prompts), params, use_tqdm=False), what)


def _last_rows(layers: int) -> Any:
    from vllm_lens import Hook

    def last(ctx: Any, hidden: Any) -> None:
        if ctx.seq_len > 1:  # the prompt
            ctx.saved[f"{ctx.layer_idx:04d}"] = hidden[-1].cpu()

    return Hook(fn=last, layer_indices=list(range(layers)))


def _steering(layer: int, hidden: int) -> Any:
    import torch
    from vllm_lens import SteeringVector

    return SteeringVector(
        activations=torch.full((1, hidden), STRENGTH), layer_indices=[layer], scale=1.0, norm_match=False
    )


@contextmanager
def build(job: Job) -> Iterator[VLLMLens]:
    quiet()
    from vllm import LLM

    llm = LLM(job.model, enforce_eager=True, **job.engine_options)
    yield VLLMLens(llm, layers_of(job), hidden_of(job))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main("vllm-lens", build)

"""TransformerLens: its bridge over the same Hugging Face model, with its own hooks and its own generation.

It runs eager attention, so that patterns can be hooked, which its documentation asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from nnsight_lab.bench.peers.runners.hf import Batched, loaded
from nnsight_lab.bench.peers.runners.measuring import Call, Job, main, on_cuda
from nnsight_lab.bench.peers.works import ALL, LAST, SAVE, STEER, STRENGTH

#: Prompts of one batch where nothing goes on: the bridge computes the logits of every position.
_BATCH: Final = 16


class TransformerLens:
    """A bridge with hooks on the outputs of its blocks."""

    def __init__(self, job: Job) -> None:
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        self.device = "cuda" if on_cuda() else "cpu"
        self.bridge: Any = TransformerBridge.boot_transformers(
            job.model,
            hf_model=loaded(job, self.device, attn_implementation="eager"),
            device=self.device,
            dtype=getattr(torch, job.dtype_name),
        )
        self.names = [f"blocks.{layer}.hook_out" for layer in range(self.bridge.cfg.n_layers)]

    def cannot(self, what: str) -> str:
        return ""

    def note(self, what: str) -> str:
        return ""

    @contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Call]:
        import torch

        kept: list[Any] = []

        def keep(hidden: Any, hook: Any) -> None:
            if hidden.shape[1] > 1:  # the prompt
                kept.append((hidden[:, -1] if what == LAST else hidden).to("cpu"))

        def steer(hidden: Any, hook: Any) -> Any:
            return hidden + STRENGTH

        middle = self.names[len(self.names) // 2]
        hooks: list[tuple[str, Any]] = [(middle, steer)] if what == STEER else []
        reading = {SAVE: [middle], ALL: self.names, LAST: self.names, STEER: self.names[-1:] if check else []}
        hooks += [(name, keep) for name in reading.get(what, [])]

        def call(prompts: list[list[int]]) -> Batched:
            batches = []
            size = len(prompts) if new_tokens > 1 else _BATCH
            for start in range(0, len(prompts), size):
                ids = torch.tensor(prompts[start : start + size], device=self.device)
                with torch.inference_mode(), self.bridge.hooks(fwd_hooks=hooks):
                    found = self.bridge.generate(
                        ids, max_new_tokens=new_tokens, stop_at_eos=False, do_sample=False,
                        return_type="tokens", verbose=False,
                    )  # fmt: skip
                batches.append((found.cpu(), list(kept)))
                kept.clear()
            return Batched(batches, len(prompts[0]), what)

        yield call


@contextmanager
def build(job: Job) -> Iterator[TransformerLens]:
    yield TransformerLens(job)


if __name__ == "__main__":
    main("transformer-lens", build)

"""Hugging Face transformers with PyTorch hooks: the reference of all values, and the slow but sure way.

A batch is one tensor: prompts of equal length, and every one goes on until the last is done. What a hook
sees is the whole batch; it copies what is asked for to the CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from nnsight_lab.bench.peers.runners.measuring import Call, Job, main, on_cuda
from nnsight_lab.bench.peers.works import ALL, LAST, SAVE, STEER, STRENGTH

#: Prompts of one batch where nothing goes on, as many as keep the activations of long prompts small.
_BATCH: Final = 16


class Batched:
    """What came home of the batches of a call."""

    def __init__(self, batches: list[tuple[Any, list[Any]]], prompt_tokens: int, what: str) -> None:
        self._batches = batches
        self._prompt_tokens = prompt_tokens
        self._what = what

    def tokens(self, prompt: int) -> list[int]:
        ids, _, row = self._at(prompt)
        return [int(token) for token in ids[row, self._prompt_tokens :]]

    def values(self, prompt: int) -> Any:
        import torch  # as the peer's

        _, kept, row = self._at(prompt)
        if not kept:
            return None
        return torch.stack([layer[row] for layer in kept]) if self._what in (ALL, LAST) else kept[0][row]

    def _at(self, prompt: int) -> tuple[Any, list[Any], int]:
        for ids, kept in self._batches:
            if prompt < len(ids):
                return ids, kept, prompt
            prompt -= len(ids)
        raise IndexError(prompt)


class HF:
    """A model with hooks on its decoder layers."""

    def __init__(self, job: Job) -> None:
        self.device = "cuda" if on_cuda() else "cpu"
        self.model = loaded(job, self.device)
        self.layers = list(_layers(self.model))

    def cannot(self, what: str) -> str:
        return ""

    def note(self, what: str) -> str:
        return ""

    @contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Call]:
        import torch

        kept: list[Any] = []

        def keep(module: Any, given: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.shape[1] > 1:  # the prompt
                kept.append((hidden[:, -1] if what == LAST else hidden).to("cpu"))

        def steer(module: Any, given: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (output[0] + STRENGTH, *output[1:])
            return output + STRENGTH

        middle = self.layers[len(self.layers) // 2]
        reading = {
            SAVE: [middle],
            ALL: self.layers,
            LAST: self.layers,
            STEER: self.layers[-1:] if check else [],
        }
        with ExitStack() as hooks:
            for layer in reading.get(what, []):
                hooks.callback(layer.register_forward_hook(keep).remove)
            if what == STEER:
                hooks.callback(middle.register_forward_hook(steer, prepend=True).remove)

            def call(prompts: list[list[int]]) -> Batched:
                batches = []
                size = len(prompts) if new_tokens > 1 else _BATCH
                for start in range(0, len(prompts), size):
                    ids = torch.tensor(prompts[start : start + size], device=self.device)
                    batches.append((self.generated(ids, new_tokens), list(kept)))
                    kept.clear()
                return Batched(batches, len(prompts[0]), what)

            yield call

    def generated(self, ids: Any, new_tokens: int) -> Any:
        """Prompts and new tokens ``[prompt, token]``, on the CPU."""
        import torch

        with torch.inference_mode():
            return self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            ).cpu()


def loaded(job: Job, device: str, **options: Any) -> Any:
    """The model on its device; straight to it where accelerate is there, which that needs."""
    import torch
    from transformers import AutoModelForCausalLM

    place = {"device_map": device} if importlib.util.find_spec("accelerate") else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype_name), local_files_only=True, **place, **options
    )
    return model.to(device).eval()


def _layers(model: Any) -> Any:
    for path in ("model.layers", "transformer.h", "gpt_neox.layers"):
        found = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    raise TypeError(f"no decoder layers are known of {type(model).__name__}")


@contextmanager
def build(job: Job) -> Iterator[HF]:
    yield HF(job)


if __name__ == "__main__":
    main("transformers", build)

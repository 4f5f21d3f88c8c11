"""What the runners share whose peer is vLLM, or stands on it."""

from __future__ import annotations

import os
from typing import Any

from nnsight_lab.bench.peers.runners.measuring import Job


def sampling(new_tokens: int, **more: Any) -> Any:
    """Greedy, and as many tokens as were asked for."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, **more)


def given(prompts: list[list[int]]) -> list[Any]:
    """Prompts as vLLM takes them."""
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def quiet() -> None:
    """Say little, and report nothing to anybody."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def layers_of(job: Job) -> int:
    """How many decoder layers the model has."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.model, local_files_only=True)
    return int(config.get_text_config().num_hidden_layers)


def hidden_of(job: Job) -> int:
    """How wide its residual stream is."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.model, local_files_only=True)
    return int(config.get_text_config().hidden_size)


class Outputs:
    """vLLM's outputs, and how the saved values are found in one."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs

    def tokens(self, prompt: int) -> list[int]:
        return [int(token) for token in self.outputs[prompt].outputs[0].token_ids]

    def values(self, prompt: int) -> Any:
        return None


class Saved(Outputs):
    """Outputs with ``saves["kept"]``: one tensor, or one of each layer."""

    def values(self, prompt: int) -> Any:
        import torch

        kept = self.outputs[prompt].saves
        if "kept" not in kept:
            return None
        found = kept["kept"]
        return torch.stack([value.cpu() for value in found]) if isinstance(found, (list, tuple)) else found

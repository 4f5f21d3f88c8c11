"""A LoRA for the tiny Llama, made here: large enough to change what the model says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models import HIDDEN, LAYERS

RANK = 8


def tiny_lora(folder: Path) -> Path:
    """An adapter of the query projections, in the form that PEFT writes and vLLM reads."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "o_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
    made = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "o_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=made)
            weights[f"{at}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=made)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder

"""Tiny random models, made here so that the tests need neither a network nor a download.

They are float32 and far larger in weight than a fresh model would be: with the usual small
initialisation every logit is nearly the same, and a wrong residual stream would pass. Heads are 32
wide, the smallest that vLLM's CPU attention takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS = 4
HIDDEN = 128
#: Keys that a query of the tiny Gemma's odd layers sees; fewer than a test's prompt has.
WINDOW = 8
#: More than any test generates, and a multiple of nothing in particular.
CONTEXT = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tokenizer() -> Any:
    """A token per byte of text, as GPT-2's tokenizer has before its merges; no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    inner = Tokenizer(BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")


def tiny_llama(folder: Path) -> Path:
    """A Llama: fused layers, whose output is ``(hidden, residual)``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _made(folder, LlamaForCausalLM, config)


def tiny_gemma2(folder: Path) -> Path:
    """A Gemma 2: soft caps on logits and scores, a sliding window in every other layer, tied ends."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=258,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=48,
        sliding_window=WINDOW,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _made(folder, Gemma2ForCausalLM, config)


def tiny_gpt2(folder: Path) -> Path:
    """A GPT-2: unfused layers, whose output is the residual stream itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=258,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    return _made(folder, GPT2LMHeadModel, config)


def tiny_llama_of_one_key_head(folder: Path) -> Path:
    """A Llama whose only key head every tensor-parallel rank has a copy of."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _made(folder, LlamaForCausalLM, LlamaConfig(**{**_COMMON, "num_key_value_heads": 1}))


def tiny_qwen3(folder: Path) -> Path:
    """A Qwen 3 with biases: a norm of each query's and each key's head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _made(folder, Qwen3ForCausalLM, Qwen3Config(**_COMMON, head_dim=32, attention_bias=True))


def tiny_mixtral(folder: Path) -> Path:
    """A Mixtral: a mixture of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)
    return _made(folder, MixtralForCausalLM, config)


def tiny_qwen2_moe(folder: Path) -> Path:
    """A Qwen 2 of experts: one more expert is shared by all tokens, and its sum waits for the others'."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **_COMMON,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
    )
    return _made(folder, Qwen2MoeForCausalLM, config)


def _made(folder: Path, kind: Any, config: Any) -> Path:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = kind(config).to(torch.float32)
        # Norms start at one and biases at zero; trained ones are neither.
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
            assert parameter.dtype == torch.float32, name
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder

"""What is known of an engine from vLLM's configuration of it, as plain data that may travel."""

from __future__ import annotations

from typing import Any

from nnsight_lab.wire.serving import EngineFacts


def facts(vllm_config: Any) -> EngineFacts:
    """What there is to know of an engine, from vLLM's configuration of it."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    return EngineFacts(
        model=str(model.model),
        device=str(vllm_config.device_config.device_type),
        dtype=str(model.dtype).removeprefix("torch."),
        itemsize=int(model.dtype.itemsize),
        context=int(model.max_model_len),
        layers=int(model.hf_text_config.num_hidden_layers),
        hidden=int(model.get_hidden_size()),
        at_once=int(scheduler.max_num_seqs),
        block_size=int(cache.block_size),
        kv_blocks=int(cache.num_gpu_blocks or 0),
        tensor_parallel=int(parallel.tensor_parallel_size),
        pipeline_parallel=int(parallel.pipeline_parallel_size),
        prefix_caching=bool(cache.enable_prefix_caching),
        sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        vocabulary=int(model.get_vocab_size()),
        head_size=int(model.get_head_size()),
        step_tokens=int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens),
    )

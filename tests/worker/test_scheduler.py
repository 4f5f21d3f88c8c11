"""vLLM's scheduler with ours mixed in, step by step and without a model: what is cut, and who waits."""

from __future__ import annotations

import importlib
import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before vLLM)
from nnsight_lab.wire.keys import BLOCK_KEYS, EDITS_KEY, REACH_KEY, SCHEDULE_CONFIG, TRACE_KEY

BLOCK = 16
MOST, PIECE = 512, 64


#: Of vLLM's, what a scheduler and its requests are made of.
PARTS = {
    "vllm.config": ["CacheConfig", "ModelConfig", "SchedulerConfig", "VllmConfig"],
    "vllm.sampling_params": ["SamplingParams"],
    "vllm.utils.hashing": ["sha256"],
    "vllm.v1.core.kv_cache_utils": ["get_request_block_hasher", "init_none_hash"],
    "vllm.v1.kv_cache_interface": ["FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec"],
    "vllm.v1.outputs": ["ModelRunnerOutput"],
    "vllm.v1.request": ["Request"],
    "vllm.v1.structured_output": ["StructuredOutputManager"],
}


@pytest.fixture(scope="module")
def parts():
    found = {name: getattr(importlib.import_module(m), name) for m, names in PARTS.items() for name in names}
    found["init_none_hash"](found["sha256"])
    return SimpleNamespace(**found)


@pytest.fixture
def make(parts, llama_path):
    def made(*, blocks=200, asynchronous=False, caching=True, **scheduling):
        from nnsight_lab.worker.scheduler import scheduler

        model = parts.ModelConfig(model=str(llama_path), dtype="float32", max_model_len=MOST)
        given = {"max_num_seqs": 16, "max_num_batched_tokens": MOST, "enable_chunked_prefill": False}
        config = parts.SchedulerConfig(
            max_model_len=MOST,
            is_encoder_decoder=False,
            **{**given, **scheduling},
        )
        cache = parts.CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
        whole = parts.VllmConfig(
            model_config=model,
            scheduler_config=config,
            cache_config=cache,
            additional_config={SCHEDULE_CONFIG: {"split_tokens": PIECE}},
        )
        cache.num_gpu_blocks = blocks
        whole.scheduler_config.async_scheduling = asynchronous  # which a CPU's platform turns off
        spec = parts.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv = parts.KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[parts.KVCacheGroupSpec(["layer"], spec)],
        )
        return scheduler(
            vllm_config=whole,
            kv_cache_config=kv,
            structured_output_manager=parts.StructuredOutputManager(whole),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )

    return made


@pytest.fixture
def ask(parts):
    hasher = parts.get_request_block_hasher(BLOCK, parts.sha256)

    def asked(scheduler, name, tokens, *, reach=None, answers=3, priority=0, skip=None):
        extra = None
        if reach is not None:
            extra = {EDITS_KEY: ["edit"], REACH_KEY: reach} if reach else {TRACE_KEY: b""}
        whole = reach in ("prompt", "mixed", "")
        params = parts.SamplingParams(
            max_tokens=answers,
            ignore_eos=True,
            extra_args=extra,
            skip_reading_prefix_cache=(reach in ("prompt", "")) if skip is None else skip,
        )
        params.update_from_generation_config({}, 1)
        ids = [hash(name) % 97 + place % 7 for place in range(tokens)]
        request = parts.Request(
            name, ids, params, None, arrival_time=0.0, block_hasher=hasher, priority=priority
        )
        request.whole = whole
        scheduler.add_request(request)
        return request

    return asked


@pytest.fixture
def step(parts):
    def stepped(scheduler):
        """One step; tokens by request. An asynchronous engine has one more under way."""
        out = scheduler.schedule()
        done = dict(out.num_scheduled_tokens)
        sampled = {n: [] if scheduler.requests[n].is_prefill_chunk else [7] for n in done}
        flying = scheduler.__dict__.setdefault("flying", deque())
        flying.append((out, sampled))
        ahead = 1 if isinstance(scheduler, AsyncScheduler) and done else 0
        while len(flying) > ahead:
            out, sampled = flying.popleft()
            result = parts.ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={name: row for row, name in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            scheduler.update_from_output(out, result)
        return done

    return stepped


def run(scheduler, step, most=400):
    """Each request's steps, until nothing is left."""
    found, order = {}, 0
    while scheduler.has_unfinished_requests():
        for name, tokens in step(scheduler).items():
            found.setdefault(name, []).append((order, tokens))
        order += 1
        assert order < most, "nothing moves"
    return found


def tokens(steps):
    return [count for _, count in steps]


def test_plain_prompts_are_cut_and_those_that_are_read_are_not(make, ask, step):
    scheduler = make()
    ask(scheduler, "plain", 300)
    ask(scheduler, "answers", 300, reach="answers")
    ask(scheduler, "alike", 300, reach="rows")
    ask(scheduler, "read", 300, reach="prompt")
    ask(scheduler, "traced", 300, reach="")
    found = run(scheduler, step)
    for name in ("plain", "answers", "alike"):
        assert max(tokens(found[name])) <= PIECE, name
        assert sum(tokens(found[name])) == 302
    for name in ("read", "traced"):
        assert tokens(found[name]) == [300, 1, 1], name


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_needs_nearly_all_of_a_step_runs_beside_many_that_generate(
    make, ask, step, asynchronous
):
    scheduler = make(asynchronous=asynchronous)
    for number in range(12):
        ask(scheduler, f"runs {number}", 5, answers=300)
    for _ in range(6):
        step(scheduler)
    ask(scheduler, "read", MOST - 16, reach="prompt")
    found = run(scheduler, step)
    assert tokens(found["read"]) == [MOST - 16, 1, 1]
    assert found["read"][0][0] < 3


@pytest.mark.parametrize("first", ["plain", "read"])
def test_neither_of_a_long_plain_prompt_and_one_that_is_read_starves_the_other(make, ask, step, first):
    scheduler = make()
    for name in (first, "read" if first == "plain" else "plain"):
        ask(scheduler, name, 500, reach="prompt" if name == "read" else None)
    for number in range(6):
        ask(scheduler, f"short {number}", 40, reach="prompt" if number % 2 else None)
    found = run(scheduler, step, most=40)
    assert tokens(found["read"]) == [500, 1, 1]
    began = {name: steps[0][0] for name, steps in found.items()}
    assert began["short 1"] >= began["read"] or first == "read"
    assert max(began.values()) < 25


def test_the_first_in_line_is_not_passed(make, ask, step):
    scheduler = make(max_num_batched_tokens=PIECE * 2, enable_chunked_prefill=True)
    ask(scheduler, "runs", 40, answers=30)
    ask(scheduler, "also runs", 40, answers=20)
    step(scheduler)
    ask(scheduler, "read", PIECE * 2, reach="prompt")  # all of a step: it waits until nothing runs
    for number in range(5):
        ask(scheduler, f"later {number}", 8)
    found = run(scheduler, step)
    assert tokens(found["read"]) == [PIECE * 2, 1, 1]
    assert all(found[f"later {n}"][0][0] >= found["read"][0][0] for n in range(5))


def test_priorities_hold(make, ask, step):
    scheduler = make(policy="priority")
    ask(scheduler, "read", 400, reach="prompt", priority=5)
    ask(scheduler, "urgent", 300, priority=1)
    ask(scheduler, "urgent read", 200, reach="prompt", priority=0)
    found = run(scheduler, step)
    assert tokens(found["read"]) == [400, 1, 1]
    assert tokens(found["urgent read"]) == [200, 1, 1]
    began = [found[name][0][0] for name in ("urgent read", "urgent", "read")]
    assert began == sorted(began)


def test_a_prompt_that_no_step_takes_is_cut_at_once_and_holds_nobody_up(make, ask, step):
    scheduler = make(max_num_batched_tokens=100, enable_chunked_prefill=True)
    ask(scheduler, "read", 300, reach="prompt")
    ask(scheduler, "other", 20, reach="prompt")
    found = run(scheduler, step)
    assert tokens(found["read"])[:3] == [100, 100, 100]
    assert tokens(found["other"]) == [20, 1, 1]


def test_the_limit_for_long_prompts_does_not_cut_one_that_is_read(make, ask, step):
    scheduler = make(enable_chunked_prefill=True, long_prefill_token_threshold=32)
    for number in range(4):
        ask(scheduler, f"plain {number}", 200)
        ask(scheduler, f"read {number}", 200, reach="prompt")
    found = run(scheduler, step)
    for number in range(4):
        assert tokens(found[f"read {number}"]) == [200, 1, 1]
    for name in ("x", "y"):
        ask(scheduler, name, 200)
    assert max(tokens(run(scheduler, step)["x"])) <= 32
    assert scheduler.scheduler_config.long_prefill_token_threshold == 32


def test_nothing_is_cut_where_somebody_said_so_or_the_platform_cannot(make, ask, step):
    scheduler = make(caching=False)
    assert not scheduler.scheduler_config.enable_chunked_prefill
    ask(scheduler, "plain", 300)
    assert tokens(run(scheduler, step)["plain"]) == [300, 1, 1]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(4))
def test_any_crowd_ends_and_every_prompt_that_is_read_is_whole(make, ask, step, seed, policy, asynchronous):
    chance = random.Random(seed)
    scheduler = make(
        policy=policy,
        asynchronous=asynchronous,
        blocks=chance.choice([80, 400]),
        long_prefill_token_threshold=chance.choice([0, 30]),
    )
    requests, found, order = {}, {}, 0
    while len(requests) < 60 or scheduler.has_unfinished_requests():
        if len(requests) < 60 and chance.random() < 0.5:
            name = f"request {len(requests)}"
            reach = chance.choice([None, None, "answers", "rows", "mixed", "prompt", ""])
            requests[name] = ask(
                scheduler,
                name,
                chance.randrange(1, 450),
                reach=reach,
                answers=chance.randrange(1, 12),
                priority=chance.randrange(3),
            )
        for name, count in step(scheduler).items():
            found.setdefault(name, []).append(count)
        order += 1
        assert order < 2000, "nothing moves"
    assert set(found) == set(requests)
    for name, request in requests.items():
        if request.whole and not request.num_preemptions:
            assert len(found[name]) in (request.max_tokens, request.max_tokens + asynchronous), name
            assert set(found[name][1:]) <= {1}, name
            if request.skip_reading_prefix_cache:
                assert found[name][0] == request.num_prompt_tokens, name


@pytest.mark.parametrize("key", BLOCK_KEYS)
def test_a_prompt_is_whole_by_whatever_way_its_blocks_come_aboard(key):
    from nnsight_lab.worker.scheduler import reads_prompt

    def request(**extra):
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))

    assert reads_prompt(request(**{key: ["block"]}))
    assert reads_prompt(request(**{key: ["block"], REACH_KEY: "prompt"}))
    assert not reads_prompt(request(**{key: ["block"], REACH_KEY: "answers"}))
    assert not reads_prompt(request(**{key: []}))

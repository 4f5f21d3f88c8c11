"""The messages travel as themselves, and a record reads as the vLLM output it was made of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight_lab.wire.codec import Record, WireError, decode, encode
from nnsight_lab.wire.messages import (
    BlockSaves,
    CompletionRecord,
    Frame,
    RequestRecord,
    RequestSaves,
    SequenceSaves,
    WorkerError,
)
from nnsight_lab.wire.registry import fits, register


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class Stats:
    arrival_time: float = 1.5
    num_generation_tokens: int = 2
    inner: list[int] = field(default_factory=list)


def vllm_output(**changes: Any) -> Any:
    """An object with the attributes of vLLM's RequestOutput."""
    completion = SimpleNamespace(
        index=0,
        text=" Paris",
        token_ids=[12, 13],
        cumulative_logprob=-0.5,
        logprobs=[{12: Logprob(-0.25, 1), 9: Logprob(-3.0, 2)}, {13: Logprob(-0.25)}],
        finish_reason="length",
        stop_reason=None,
    )
    output = {
        "request_id": "7",
        "prompt": "The capital of France is",
        "prompt_token_ids": [1, 2, 3],
        "outputs": [completion],
        "finished": True,
        "metrics": Stats(),
    }
    return SimpleNamespace(**(output | changes))


def test_a_record_reads_as_the_output_it_was_made_of() -> None:
    record = RequestRecord.of(vllm_output())
    assert record.outputs[0].text == " Paris"
    assert record.outputs[0].token_ids == (12, 13)
    assert record.outputs[0].logprobs == ({12: -0.25, 9: -3.0}, {13: -0.25})
    assert record.outputs[0].finished()
    assert record.prompt_token_ids == (1, 2, 3)
    assert record.metrics == {"arrival_time": 1.5, "num_generation_tokens": 2}
    assert record.finished


def test_a_record_travels_as_itself() -> None:
    record = RequestRecord.of(vllm_output())
    got = decode(encode(record))
    assert type(got) is RequestRecord
    assert got == record


def test_an_output_without_text_metrics_or_logprobs_has_a_record_too() -> None:
    output = vllm_output(prompt=None, prompt_token_ids=None, metrics=None)
    output.outputs[0].logprobs = None
    output.outputs[0].cumulative_logprob = None
    record = RequestRecord.of(output)
    assert (record.prompt, record.prompt_token_ids, record.metrics) == (None, None, None)
    assert record.outputs[0].logprobs is None
    assert decode(encode(record)) == record


def test_saves_travel_with_their_tensors_and_their_error() -> None:
    error = WorkerError(
        *("OutOfOrderError", "too late", (Frame("cell", 2, "<module>", "x = 1"),), False),
        requested=(("model.layers.3.output", 0),),
        order=("model.layers.3", "model.layers.4"),
    )
    hidden = torch.randn(2, 3)
    saves = RequestSaves(
        "7", (SequenceSaves(0, (BlockSaves("trace", {"h": hidden, "again": [hidden]}, error),)),), None
    )
    got = decode(encode(saves))
    block = got.sequences[0].blocks[0]
    assert (type(got), type(block)) == (RequestSaves, BlockSaves)
    assert torch.equal(block.values["h"], hidden)
    assert block.values["again"][0] is block.values["h"]
    assert block.error == error


def test_messages_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Frame("f", 1, "g").lineno = 2  # type: ignore[misc]


def test_a_message_of_an_older_side_takes_defaults_for_what_it_lacks() -> None:
    data = encode(Frame("f", 1, "g", "text")).replace(b',"text":"text"', b"")
    length = int.from_bytes(data[8:16], "little") - len(b',"text":"text"')
    assert decode(data[:8] + length.to_bytes(8, "little") + data[16:]) == Frame("f", 1, "g")


def test_a_field_of_another_type_is_refused() -> None:
    for wrong in (
        CompletionRecord(0, "", (1, "2")),  # type: ignore[arg-type]
        CompletionRecord(0, "", [1]),  # type: ignore[arg-type]
        CompletionRecord(True, "", ()),
        CompletionRecord(0, "", (), logprobs=({1: "x"},)),  # type: ignore[dict-item]
        RequestRecord("r", None, None, (Frame("f", 1, "g"),), True),  # type: ignore[arg-type]
    ):
        data = encode(wrong)
        with pytest.raises(WireError, match="Record"):
            decode(data)


def test_a_users_subclass_of_a_message_is_only_a_record() -> None:
    @dataclass(frozen=True)
    class MyFrame(Frame):
        pass

    assert type(decode(encode(MyFrame("f", 1, "g")))) is Record


def test_only_frozen_dataclasses_of_a_new_name_can_be_registered() -> None:
    with pytest.raises(TypeError, match="frozen"):

        @register
        @dataclass
        class Open:
            pass

    with pytest.raises(TypeError, match="registered already"):

        @register
        @dataclass(frozen=True)
        class Frame:
            pass


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (True, int, False),
        (None, int | None, True),
        ((1, "a"), tuple[int, str], True),
        ((1,), tuple[int, str], False),
        ([1, 2], list[int], True),
        ([1, None], list[int], False),
        ({"a": 1}, dict[str, Any], True),
        ({1: 1}, dict[str, Any], False),
        ((), tuple[int, ...], True),
    ],
)
def test_an_annotation_is_checked_as_written(value: Any, hint: Any, expected: bool) -> None:
    assert fits(value, hint) is expected

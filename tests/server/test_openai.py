"""Plain OpenAI clients on a shared engine: they know nothing of edits, and run those that apply to them."""

from __future__ import annotations

import time

import openai
import pytest
import torch
from safetensors.torch import load

from nnsight_lab.wire.serving import PREFIX
from tests.server.conftest import TOKENS
from tests.server.test_served import GREEDY, PARIS, TOWER, mute
from tests.waiting import until

pytestmark = pytest.mark.engine

ASKED = {"model": "demo", "prompt": TOWER, **GREEDY}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKENS["alice"], max_retries=0) as found:
        yield found


def chosen(*names):
    """How a stock client names edits."""
    return {"vllm_xargs": {"nnsight_edits": list(names)}}


def saved(server, request_id, user="alice", **params):
    """What a request saved, by the response's id."""
    with server.http(user) as http:
        answer = http.get(f"{PREFIX}/saves/{request_id}", params=params)
    return answer.status_code, load(answer.content) if answer.status_code == 200 else answer.json()


def test_a_request_runs_its_owners_edits_or_those_it_names(attach, client, server):
    engine = attach()
    edit = mute(engine)
    model = engine.model
    with engine.edit("probe"):
        probe = model.model.layers[1].output[0].save()  # noqa: F841
    both, none, one = (
        client.completions.create(**ASKED, extra_body=more) for more in (None, chosen(), chosen("probe"))
    )
    assert both.choices[0].text != PARIS
    assert none.choices[0].text == one.choices[0].text == PARIS
    _, tensors = saved(server, both.id)
    assert sorted(tensors) == ["mute/hidden", "probe/probe"]
    assert saved(server, none.id)[0] == 404
    _, tensors = saved(server, one.id)
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {"probe/probe": (9, 576)}
    with engine.trace(TOWER, max_tokens=1, edits=[]):
        same = model.model.layers[1].output[0].save()
    torch.testing.assert_close(tensors["probe/probe"], same, atol=0, rtol=0)
    _, rows = saved(server, one.id, name="probe/probe", rows="2:4")
    torch.testing.assert_close(rows["probe/probe"], same[2:4], atol=0, rtol=0)
    assert saved(server, one.id, rows="x")[0] == 400
    assert saved(server, one.id, name="nope")[0] == 404
    edit.clear()
    assert client.completions.create(**ASKED).choices[0].text == PARIS


def test_values_that_share_memory_and_one_value_under_two_names_are_fetched_whole(attach, client, server):
    engine = attach()
    model = engine.model
    with engine.edit("many"):
        streams = [layer.output[0] for layer in model.model.layers].save()
        again = streams[0].save()  # noqa: F841
        parts = [streams[0][:4], streams[0][4:], streams[0].t()].save()  # noqa: F841
    done = client.completions.create(**ASKED, extra_body=chosen("many"))
    status, tensors = saved(server, done.id)
    assert status == 200
    assert len(tensors) == 30 + 1 + 3
    first = tensors["many/again"]
    assert torch.equal(first, tensors["many/streams/0"])
    assert torch.equal(first, torch.cat([tensors["many/parts/0"], tensors["many/parts/1"]]))
    assert torch.equal(first.t(), tensors["many/parts/2"])
    with engine.trace(TOWER, max_tokens=1, edits=[]):
        last = model.model.layers[29].output[0].save()
    assert torch.equal(last, tensors["many/streams/29"])


def test_chat_streams_and_several_answers_run_edits_and_leave_nothing(attach, client, server):
    engine = attach()
    mute(engine)
    messages = [{"role": "user", "content": TOWER}]
    chat = client.chat.completions.create(model="demo", messages=messages, **GREEDY)
    assert saved(server, chat.id)[1]["mute/hidden"].shape[1] == 576
    streamed = list(client.completions.create(**ASKED, stream=True))
    assert len(streamed) > 1
    assert saved(server, streamed[0].id)[1]["mute/hidden"].shape == (9, 576)
    several = client.completions.create(**{**ASKED, "temperature": 0.8}, n=3, seed=7)
    assert len({choice.index for choice in several.choices}) == 3
    assert sorted(saved(server, several.id)[1]) == ["mute#1/hidden", "mute#2/hidden", "mute/hidden"]
    assert server.figures()["requests"] == 0


def test_a_client_that_leaves_ends_its_request(attach, client, server):
    engine = attach()
    mute(engine)
    stream = client.completions.create(
        model="demo", prompt="Once", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.figures()["requests"] == 1
    stream.close()
    until(lambda: server.figures()["requests"] == 0, 5, "the request ends")
    assert engine.generate(TOWER, **GREEDY)[0].outputs[0].text != PARIS


@pytest.mark.parametrize(
    ("edits", "status"),
    [(5, 400), ("probe", 400), ([5], 400), (["nope"], 404), (["a", "a"], 400), ({"a": 1}, 400), (True, 400)],
)
def test_edits_of_any_other_kind_are_refused_and_the_engine_goes_on(client, edits, status):
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(**ASKED, extra_body={"vllm_xargs": {"nnsight_edits": edits}})
    assert raised.value.status_code == status
    assert client.completions.create(**ASKED).choices[0].text == PARIS


@pytest.mark.parametrize("key", ["lab_trace", "lab_edits", "lab_budget"])
@pytest.mark.parametrize("value", [5, "abc", ["root/edit-1"], [1]])
def test_what_the_workers_are_told_cannot_be_said_by_a_client(client, key, value):
    done = client.completions.create(**ASKED, extra_body={"vllm_xargs": {key: value}})
    assert done.choices[0].text == PARIS


def test_saves_are_their_owners_and_are_forgotten(attach, client, server):
    engine = attach()
    mute(engine)
    done = client.completions.create(**ASKED)
    before = saved(server, "not-there", "bob")
    assert saved(server, done.id, "bob") == before
    with server.http("bob") as http:
        assert http.delete(f"{PREFIX}/saves/{done.id}").status_code == 204
    assert saved(server, done.id)[0] == 200
    with server.http() as http:
        assert http.delete(f"{PREFIX}/saves/{done.id}").status_code == 204
    assert saved(server, done.id)[0] == 404


def test_a_failed_edit_is_told_with_the_saves_and_the_text_comes(attach, client, server):
    engine = attach()
    model = engine.model
    with engine.edit("broken"):
        before = model.model.layers[0].output[0][-1].save()  # noqa: F841
        raise ValueError("on purpose")
    done = client.completions.create(**ASKED)
    assert done.choices[0].text == PARIS
    with server.http() as http:
        body = http.get(f"{PREFIX}/saves/{done.id}").content
    length = int.from_bytes(body[:8], "little")
    assert b"ValueError: on purpose" in body[8 : 8 + length]


@pytest.mark.parametrize(
    "path",
    ["/docs", "/openapi.json", "/metrics", "/v1/load_lora_adapter", "//v1/models", "/v1/../metrics", "/x"],
)
def test_what_is_not_served_is_not_found(server, path):
    with server.http("alice") as http:
        assert http.get(path).status_code == 404
    with server.http(None) as http:
        assert http.get(path).status_code == 401


def test_a_body_over_the_limit_is_refused_whatever_its_header_says(server):
    def chunks():
        for _ in range(300):
            yield b"x" * 2**20

    with server.http() as http:
        began = time.monotonic()
        answer = http.post("/v1/completions", content=chunks())
        assert answer.status_code == 413
        assert time.monotonic() - began < 30
    with server.http() as http:
        assert http.post("/v1/completions", json=ASKED).status_code == 200


def test_a_priority_cannot_be_said(server):
    with server.http() as http:
        headers = {"X-Vllm-Priority": "-100", "X-Request-Id": "../../mine"}
        done = http.post("/v1/completions", json=ASKED, headers=headers)
        assert done.status_code == 200
        assert "mine" not in done.json()["id"]


def test_a_request_that_never_begins_counts_no_more(attach, client, server):
    """Of several prompts one is refused: the others were counted, and never run."""
    engine = attach()
    edit = mute(engine)
    for prompts in (["One"] * 65, ["One", "word " * 4000]):
        with pytest.raises(openai.APIStatusError):
            client.completions.create(**{**ASKED, "prompt": prompts})
    until(lambda: server.figures()["requests"] == 0, 5, "none is counted")
    edit.clear()
    until(lambda: server.figures()["edits"] == 0, 5, "and none holds the edit")
    assert client.completions.create(**ASKED).choices[0].text == PARIS


def test_answers_count_as_requests_do(client):
    with pytest.raises(openai.APIStatusError, match="at most 64 requests here, not 65"):
        client.completions.create(**{**ASKED, "temperature": 0.8}, n=65)


@pytest.mark.parametrize("prompt", [[-1], [10**9], [2**70], [[-5, 3]], [1.5], {"a": 1}, 5, [], [None], True])
def test_a_prompt_of_any_other_kind_is_refused_and_the_engine_goes_on(server, client, prompt):
    with server.http() as http:
        answer = http.post("/v1/completions", json={**ASKED, "prompt": prompt})
        assert 400 <= answer.status_code < 600
    assert client.completions.create(**ASKED).choices[0].text == PARIS

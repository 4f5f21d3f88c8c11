"""Kernels on a shared engine: the same cells as on one of their own, and nobody in another's way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine import remote_driver
from nnsight_lab.engine.call import Call
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.errors import (
    EditRefused,
    Interrupted,
    LensRefused,
    RequestRefused,
    ServerError,
    TraceError,
    UnknownEdit,
)
from nnsight_lab.wire.serving import PREFIX, CallAsked, EditAsked
from tests.server.conftest import TOKENS
from tests.waiting import until

pytestmark = pytest.mark.engine

TOWER = "The Eiffel Tower is in the city of"
PARIS = " Paris, France."
GREEDY = {"max_tokens": 4, "temperature": 0}


def text_of(engine, prompt=TOWER, **more):
    """What a user's own request says."""
    return engine.generate(prompt, **{**GREEDY, **more})[0].outputs[0].text


def mute(engine, name="mute"):
    """An edit whose effect is seen in the text."""
    model = engine.model
    with engine.edit(name) as (_tracer, edit):
        model.model.layers[2].output[1][:] = 0
        hidden = model.model.layers[3].output[0].save()  # noqa: F841
    return edit


def test_a_trace_and_an_edit_give_what_an_engine_of_ones_own_gives(attach, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    remote = attach()
    own = lab.start("demo", name="own", mode="sync", max_model_len=1024)
    try:
        found = {}
        for engine in (own, remote):
            model = engine.model
            with engine.trace(TOWER, **GREEDY) as tracer:
                layers = [layer.output[0][-1] for layer in model.model.layers].save()
                logits = [].save()
                for _ in tracer.all():
                    logits.append(model.logits[0])
            with engine.trace([TOWER, "One, two,"], max_tokens=2, temperature=0):
                many = model.model.layers[7].mlp.output.save()
            with engine.trace(temperature=0, max_tokens=1) as tracer:
                with tracer.invoke(TOWER):
                    a = model.model.layers[1].output[0].save()
                with tracer.invoke("One, two,"):
                    b = model.model.layers[1].output[0].save()
            edit = mute(engine)
            sampled = engine.generate(TOWER, n=3, temperature=0.8, seed=7, max_tokens=3)[0]
            found[engine.name] = (
                [torch.stack(layers), torch.stack(logits), *many, a, b, sampled.saves["hidden"]],
                [text_of(engine), text_of(engine, edits=[]), *(one.text for one in sampled.outputs)],
                [one.saves["hidden"].shape for one in sampled.outputs],
                sampled.outputs[0].token_ids,
            )
            edit.clear()
        mine, theirs = found[own.name], found[remote.name]
        assert mine[1:] == theirs[1:]
        assert mine[1][1] == PARIS
        for one, other in zip(mine[0], theirs[0], strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, atol=0.0, rtol=0.0)
    finally:
        lab.stop("own")


def test_a_kernel_attaches_without_vllm_and_without_weights(server):
    script = (
        "import sys, nnsight_lab as lab\n"
        f"engine = lab.attach({server.url!r})\n"
        "model = engine.model\n"
        f"with lab.trace({TOWER!r}, max_tokens=1) as tracer:\n"
        "    hidden = model.model.layers[3].output[0].save()\n"
        "print(tuple(hidden.shape), 'vllm' in sys.modules, model.model.layers[3].mlp.gate_up_proj)\n"
        "print(engine.tokenizer.decode(tracer.output.prompt_token_ids), len(engine.saves))\n"
        "label = engine.saves.labels(engine.saves.ids()[0])[0]\n"
        "print(label.path, label.model.split('/')[-1], sorted(label.versions))\n"
    )
    env = {**os.environ, "NNSIGHT_LAB_TOKEN": TOKENS["bob"]}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "(9, 576) False" in done.stdout
    assert f"{TOWER} 1" in done.stdout


def test_errors_of_a_block_are_raised_as_themselves_on_their_line(attach):
    engine = attach()
    model = engine.model
    with (
        pytest.raises(TraceError, match="NameError: name 'nope' is not defined") as raised,
        engine.trace(TOWER),
    ):
        x = model.model.layers[2].output[0]
        x + nope  # noqa: F821
    assert "x + nope" in str(raised.value)
    with pytest.raises(RequestRefused, match="Did you mean 'max_tokens'"):
        engine.generate(TOWER, max_tokenz=3)
    with pytest.raises(RequestRefused, match="temperature must be non-negative"):
        engine.generate(TOWER, temperature=-3)
    with pytest.raises(RequestRefused):
        engine.generate("word " * 4000)
    with pytest.raises(UnknownEdit):
        engine.generate(TOWER, edits=["nope"])
    with pytest.raises(EditRefused):
        engine.edit("trace")
    assert text_of(engine) == PARIS


@pytest.mark.parametrize("line", ["raise SystemExit", "raise KeyboardInterrupt", "import sys; sys.exit(3)"])
def test_a_block_that_would_end_its_process_fails_alone(attach, line):
    alice, bob = attach(), attach("bob")
    model = alice.model
    with pytest.raises(TraceError), alice.trace(TOWER, max_tokens=1):
        model.model.layers[0].output[0].mean()
        exec(line)
    assert text_of(bob) == PARIS


def test_two_users_with_one_name_have_two_edits(attach, server):
    alice, bob = attach(), attach("bob")
    mute(alice, "same")
    model = bob.model
    with bob.edit("same"):
        hidden = model.model.layers[5].output[0].save()  # noqa: F841
    changed = alice.generate(TOWER, **GREEDY)[0]
    plain = bob.generate(TOWER, **GREEDY)[0]
    assert changed.outputs[0].text != PARIS
    assert plain.outputs[0].text == PARIS
    assert not torch.equal(changed.saves["hidden"], plain.saves["hidden"])
    with server.http("bob") as http:
        listed = http.get(f"{PREFIX}/edits").json()
        assert [(one["name"], one["owner"]) for one in listed] == [("same", "bob")]


def test_nothing_of_another_can_be_named_listed_or_cleared(attach, server):
    alice, bob = attach(), attach("bob")
    edit = mute(alice)
    theirs = edit._current.id
    # The same words for what is another's and for what is not there.
    with server.http("bob") as http:
        answers = [
            (http.patch(f"{PREFIX}/edits/{one}", json={"on": False}).text) for one in (theirs, "not-there")
        ]
        assert answers[0] == answers[1]
        assert "no edit of yours" in answers[0]
        assert http.delete(f"{PREFIX}/edits/{theirs}").status_code == 204
        assert http.delete(f"{PREFIX}/leases/{alice._remote.lease}").status_code == 204
    request = bob.request(TOWER, GREEDY, (edit._current,))
    call = Call([request])
    bob._driver.submit(call)
    with pytest.raises(ServerError, match="no edit that the request names of yours"):
        call.future.result(timeout=30)
    assert text_of(alice) != PARIS
    assert text_of(bob) == PARIS


def test_only_an_admin_publishes_and_what_is_published_runs_for_everybody(attach, server):
    alice, root, bob = attach(), attach("*root"), attach("bob")
    mine, theirs = mute(alice), mute(root, "for_all")
    with server.http("alice") as http:
        asked = http.patch(f"{PREFIX}/edits/{mine._current.id}", json={"published": True})
        assert asked.status_code == 403
    body = {"model": "demo", "prompt": TOWER, **GREEDY}
    with server.http("bob") as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == PARIS
        with server.http("*root") as admin:
            admin.patch(f"{PREFIX}/edits/{theirs._current.id}", json={"published": True}).raise_for_status()
        done = http.post("/v1/completions", json=body).json()
        assert done["choices"][0]["text"] != PARIS
        saved = http.get(f"{PREFIX}/saves/{done['id']}")
        assert saved.status_code == 200
        opted_out = {**body, "vllm_xargs": {"nnsight_edits": []}}
        assert http.post("/v1/completions", json=opted_out).json()["choices"][0]["text"] == PARIS
    assert text_of(bob, edits=[]) == PARIS
    theirs.clear()  # it would outlive its kernel
    assert text_of(bob) == PARIS


def test_what_one_user_may_have_is_bounded_and_said(attach, server, monkeypatch):
    engine = attach()
    for number in range(8):
        mute(engine, f"edit{number}")
    with pytest.raises(
        ServerError, match=r"You have 8 edits, as many as one user may\. Try again in 1 s"
    ) as raised:
        mute(engine, "one_more")
    assert raised.value.status == 429
    assert raised.value.retry_after_s == 1
    call = Call([engine.request("One", {"max_tokens": 1}, ()) for _ in range(65)])
    monkeypatch.setattr(engine._remote, "served", dataclasses.replace(engine.served, requests=0))
    with pytest.raises(ServerError, match="A call has at most 64 requests here, not 65"):
        engine._remote._exchange(call)


def test_a_call_of_more_requests_than_one_user_may_have_goes_in_pieces(attach, server):
    engine = attach()
    seen = []
    prompts = [f"{number} and" for number in range(70)]
    others = [Call([engine.request("Once", {"max_tokens": 200, "ignore_eos": True}, ())]) for _ in range(3)]
    for other in others:  # which leave too little room for a whole piece, for a while
        engine.submit(other)
    until(lambda: server.figures()["requests"] == 3, 30, "the others")
    outputs = engine.generate(
        prompts,
        max_tokens=1,
        edits=[],
        watch=lambda now: seen.append(sum(one.finished for one in now)),
    )
    assert [output.prompt for output in outputs] == prompts
    assert seen == sorted(seen)
    assert seen[-1] == 70
    for other in others:
        engine.wait(other)
    request = engine.generate(["The"] * 40, n=2, temperature=1.0, max_tokens=1, edits=[])
    assert [len(output.outputs) for output in request] == [2] * 40


@pytest.mark.parametrize(
    "prompt",
    [
        *([one] for one in (-1, 10**9, 2**70, 1.5, True, None, "a")),
        *({"prompt": one} for one in ("", 5, None)),
        {"prompt_token_ids": [1], "multi_modal_data": {"image": torch.zeros(2)}},
        {"prompt_embeds": torch.zeros(3, 5)},
        5,
        None,
        torch.zeros(3),
    ],
)
def test_a_prompt_of_any_other_kind_is_refused_and_the_engine_goes_on(attach, prompt):
    engine = attach()
    asked = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    request = engine.request("One", {"max_tokens": 1}, ())
    request.prompt = asked
    call = Call([request])
    engine._driver.submit(call)
    with pytest.raises(RequestRefused, match="A prompt is text, or ids of tokens that the model has"):
        call.future.result(timeout=30)
    assert text_of(engine) == PARIS


def test_an_interrupt_reaches_the_server_however_many_calls_run(attach, server):
    engine = attach()
    calls = [Call([engine.request("Once", {"max_tokens": 900, "ignore_eos": True}, ())]) for _ in range(40)]
    for call in calls:
        engine.submit(call)
    until(lambda: server.figures()["requests"] == 40, 30, "all of them")
    assert engine.abort_all() == 40
    until(lambda: server.figures()["requests"] == 0, 10, "none left")
    assert text_of(engine) == PARIS


def test_a_kernel_that_was_silent_too_long_has_its_edits_back(attach, server, monkeypatch):
    monkeypatch.setattr(remote_driver, "RENEW_S", 0.3)
    engine = attach()
    mute(engine)
    with server.http("alice") as http:
        assert http.delete(f"{PREFIX}/leases/{engine._remote.lease}").status_code == 204
    until(lambda: server.figures()["edits"] == 1, 10, "the edit is back")
    assert text_of(engine) != PARIS
    assert text_of(engine, edits=[]) == PARIS


def test_a_lens_is_read_on_the_server_and_what_cannot_be_is_refused(attach):
    engine = attach()
    lens = engine.logit_lens(TOWER, layers=[0, 29], top_k=2)
    assert lens.top_tokens[-1][-1][0] == " Paris"
    with pytest.raises(LensRefused, match="need an engine of this kernel's own"):
        engine.attention(TOWER, layers=[3])
    with pytest.raises(RequestRefused, match="needs an engine of this kernel's own"):
        engine.estimate(TOWER)
    assert text_of(engine) == PARIS


def test_a_running_request_is_watched_as_its_own_kernel_would(attach, server):
    engine = attach()
    model = engine.model
    with engine.edit("watched") as (tracer, _edit):
        norms = [].save()
        for _ in tracer.all():
            norms.append(model.model.layers[3].output[0][-1].norm())
    request = engine.request("Once", {"max_tokens": 300, "ignore_eos": True}, engine.edits.chosen(None))
    peeks = Peeks()
    call = Call([request], live=True, peeks=peeks)
    engine.submit(call)
    engine.wait(call)
    assert peeks.looks > 2
    seen = [len(one) for one in peeks._lists.values()]
    assert seen
    assert 0 < seen[0] <= 300
    with server.http("bob") as http:  # another's lease is none
        asked = http.post(f"{PREFIX}/leases/{engine._remote.lease}/peek", content=peeks.question("x"))
        assert asked.status_code == 404


def test_an_interrupt_aborts_on_the_server_and_the_next_call_runs(attach, server):
    engine = attach()

    def press():
        until(lambda: server.figures()["requests"] == 1, 30, "a request")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(Interrupted):
        engine.generate("Once upon a time", max_tokens=1000, ignore_eos=True)
    presser.join()
    until(lambda: server.figures()["requests"] == 0, 5, "none left")
    assert text_of(engine) == PARIS


def test_a_kernel_that_is_killed_leaves_nothing_running(server):
    script = (
        "import nnsight_lab as lab\n"
        f"engine = lab.attach({server.url!r})\n"
        "engine.generate('Once upon a time', max_tokens=1000, ignore_eos=True)\n"
    )
    env = {**os.environ, "NNSIGHT_LAB_TOKEN": TOKENS["alice"]}
    kernel = subprocess.Popen([sys.executable, "-c", script], env=env)
    until(lambda: server.figures()["requests"] == 1, 60, "its request")
    kernel.kill()
    kernel.wait()
    began = time.monotonic()
    until(lambda: server.figures()["requests"] == 0, 10, "none left")
    assert time.monotonic() - began < 2
    # Its lease holds a little longer: it says that it is there every few seconds.
    until(lambda: server.figures()["leases"] == 0, 30, "no lease")


def test_a_wrong_token_and_a_server_that_is_not_there_are_one_line(attach, server):
    with pytest.raises(ServerError, match="The token is not one that may use this service") as raised:
        attach(token="wrong-0123456789abcdef")
    assert raised.value.status == 403
    with pytest.raises(ServerError, match="does not answer"):
        lab.attach("http://127.0.0.1:9", name="nobody")
    assert "nobody" not in lab.engines()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"nnslab\n\x01" + b"\xff" * 8, b"\x80\x04K\x05."])
def test_bytes_that_are_no_message_are_refused(server, content):
    with server.http() as http:
        for route in ("calls", "edits"):
            answer = http.post(f"{PREFIX}/{route}", content=content)
            assert answer.status_code == 400
            assert "cannot be read" in answer.text


def test_a_block_that_is_no_pickle_is_refused_and_forgotten(attach, server):
    engine = attach()
    asked = EditAsked("edit-x", "bad", b"not a pickle", engine._remote.lease)
    with server.http() as http:
        from nnsight_lab.wire.codec import encode

        answer = http.post(f"{PREFIX}/edits", content=encode(asked))
        assert answer.status_code == 400
        assert "could not read the block" in answer.text
        assert http.get(f"{PREFIX}/edits").json() == []


def test_pieces_of_a_call_are_calls_of_their_own_to_the_server(attach, monkeypatch):
    """It may still be ending one while the next runs, and would end that under the same id."""
    engine, ids, encode = attach(), [], remote_driver.encode

    def noted(message):
        if type(message) is CallAsked:
            ids.append(message.id)
        return encode(message)

    monkeypatch.setattr(remote_driver, "encode", noted)
    engine.generate([f"{number} and" for number in range(70)], max_tokens=1)
    assert len(ids) >= 2
    assert len(set(ids)) == len(ids)

"""A server of level strict: edits are data, and no code of a user's is ever read."""
# ruff: noqa: F841

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import nnsight_lab as lab
from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.engine.call import Call
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import (
    EditRefused,
    LensRefused,
    RequestRefused,
    ServeRefused,
    ServerError,
    TraceError,
)
from nnsight_lab.server.trust import Trust
from nnsight_lab.wire.keys import DECLARED_KEY, TRACE_KEY
from nnsight_lab.wire.serving import PREFIX, EditAsked
from nnsight_lab.worker.declarations import Declarations
from tests.server.conftest import TOKENS, Server
from tests.server.test_served import GREEDY, PARIS, TOWER, text_of

pytestmark = pytest.mark.engine

#: Where whoever unpickles it would leave a mark: a folder that a jailed worker writes to.
MARK = Path("/dev/shm/nnsight-lab-was-unpickled")


class Evil:
    def __reduce__(self):
        return (MARK.touch, ())


@pytest.fixture
def engine(strict: Server) -> Iterator[RemoteEngine]:
    found = RemoteEngine("strict", strict.url, TOKENS["alice"])
    found.start()
    yield found
    found.stop()
    assert not MARK.exists()


def test_steps_run_and_save(engine):
    edit = engine.edit(
        "steer",
        steps=[
            lab.steps.ablate("model.layers.2", positions="last"),
            lab.steps.read("model.layers.2", "hidden", positions="prompt"),
        ],
    )
    (output,) = engine.generate(TOWER, **GREEDY)
    assert output.outputs[0].text != PARIS
    assert (output.saves["hidden"] == 0).all(-1).tolist() == [False] * 8 + [True]
    assert text_of(engine, edits=[]) == PARIS
    edit.clear()
    assert text_of(engine) == PARIS


def test_a_block_is_refused_on_its_line_with_what_to_write_instead(engine):
    model = engine.model
    said = r"of level strict: it takes edits that are data, as lab\.edit\(\"steer\", steps=.*no block of code"
    with pytest.raises(EditRefused, match=said), engine.trace(TOWER, max_tokens=1):
        hidden = model.model.layers[3].output[0].save()
    with pytest.raises(EditRefused, match=said), engine.trace([TOWER, "One"], max_tokens=1):
        hidden = model.model.layers[3].output[0].save()
    with pytest.raises(EditRefused, match=said), engine.edit("probe"):
        hidden = model.model.layers[3].output[0].save()
    with pytest.raises(EditRefused, match=said), engine.trace(max_tokens=1) as tracer:  # noqa: SIM117
        with tracer.invoke(TOWER):
            hidden = model.model.layers[3].output[0].save()
    assert text_of(engine) == PARIS


def test_the_server_refuses_what_no_kernel_of_ours_would_send_and_unpickles_nothing(engine, strict):
    payload = pickle.dumps(Evil())
    driver = engine._remote
    for scoped in (False, True):
        name = "trace" if scoped else "probe"
        with pytest.raises(ServerError, match=r"of level strict.*no block of code") as raised:
            driver._edit(EditAsked("one", name, payload, driver.lease, scoped=scoped))
        assert raised.value.status == 403
    with pytest.raises(RequestRefused, match="cannot be read"):
        driver._edit(EditAsked("one", "probe", payload, driver.lease, declared=True))
    for key, said in ((TRACE_KEY, "of level strict"), (DECLARED_KEY, "The block cannot be read")):
        request = engine.request(TOWER, {"max_tokens": 1}, ())
        request.params.extra_args = {key: payload}
        call = Call([request])
        driver.submit(call)
        with pytest.raises((ServerError, RequestRefused), match=said):
            call.future.result(timeout=30)
    # An OpenAI client's own field does not reach the worker either.
    body = {"model": "demo", "prompt": TOWER, **GREEDY, "vllm_xargs": {"lab_trace": "x", "lab_declared": "x"}}
    with strict.http("alice") as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == PARIS
    assert not MARK.exists()


def test_a_strict_worker_would_not_unpickle_either():
    worker = object.__new__(Declarations)
    worker.strict = True
    with pytest.raises(EditRefused, match="no block of code"):
        worker.refuse_code()


def test_a_logit_lens_is_our_own_code_and_its_data_are_no_way_to_any_other(engine):
    lens = engine.logit_lens(TOWER, target=" Paris")
    assert lens.tokens is not None
    assert text_of(engine) == PARIS
    with pytest.raises(LensRefused, match="Attention patterns need an engine of this kernel's own"):
        engine.attention(TOWER)
    asked = {"layers": "model.layers", "norm": "interleaver.cancel", "count": 30, "tokens": 9, "wanted": [0]}
    block = DeclaredBlock.of("lens", {"asked_of": 1, **asked, "positions": [0], "key": "x", "check": False})
    call = Call([engine.request(TOWER, {"max_tokens": 1}, (), block)])
    engine.submit(call)
    engine.wait(call)
    with pytest.raises(TraceError):
        engine.raise_errors(call, engine.outputs(call))
    del block.asked["asked_of"]
    call = Call([engine.request(TOWER, {"max_tokens": 1}, (), block)])
    engine.submit(call)
    engine.wait(call)
    with pytest.raises(TraceError, match=r"has no attribute .*interleaver"):
        engine.raise_errors(call, engine.outputs(call))
    assert text_of(engine) == PARIS


def test_the_level_is_said_where_people_look(engine, strict):
    with strict.http("alice") as http:
        health = http.get(f"{PREFIX}/health").json()
    assert health["level"] == "strict"
    assert "no code of a user's runs" in health["level_means"]
    assert engine.served.level == "strict"
    assert "strict: edits are data" in dict(engine.status().rows())["level"]
    assert "strict: edits are data" in str(engine.status())
    assert engine.shown_options()[0] == ("level", "strict")


class Workers:
    """An engine's client, as far as a jail is asked for: answers what its workers would."""

    def __init__(self, *answers):
        self.answers = answers
        self.asked = []

    async def collective_rpc(self, method, args=()):
        self.asked.append((method, *args))
        return list(self.answers)


YES = {"no privileges": "yes (none)", "files": "yes (few)", "system calls": "yes (few)"}


@pytest.mark.asyncio
async def test_a_jail_that_is_insisted_on_is_whole_or_the_server_does_not_start(capsys):
    part = {**YES, "files": "no: this kernel has no Landlock"}
    with pytest.raises(
        ServeRefused, match=r"files \(no: this kernel has no Landlock\).*--jail=auto does without"
    ):
        await Trust(Workers({"own user": "yes (nobody)", **YES}, {**part}), "team", "on").enter(65534)
    with pytest.raises(ServeRefused, match=r"own user .no: the server is not root's"):
        await Trust(Workers(YES), "team", "on").enter(None, "the server is not root's")
    whole = Trust(Workers({"own user": "yes (nobody)", **YES}), "strict", "on")
    await whole.enter(65534)
    assert whole.figures()["jail"] == "on"
    assert "level strict" in capsys.readouterr().out


@pytest.mark.asyncio
async def test_what_any_worker_lacks_is_said_and_no_jail_is_said_to_be_none():
    workers = Workers(YES, {**YES, "files": "no: this kernel has no Landlock"})
    trust = Trust(workers, "team", "auto")
    await trust.enter(None, "the server is not root's")
    assert trust.layers["files"] == "no: this kernel has no Landlock"
    assert trust.layers["own user"] == "no: the server is not root's"
    assert workers.asked == [("lab_trust", "team", True, None)]
    none = Trust(Workers({}, {}), "solo", "off")
    await none.enter(None)
    assert (none.said(), none.figures()["jail"]) == ("off", "off")

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
from nnsight_lab.errors import EditRefused, LensRefused, RequestRefused, ServerError, TraceError
from nnsight_lab.wire.keys import DECLARED_KEY, TRACE_KEY
from nnsight_lab.wire.serving import PREFIX, EditAsked
from nnsight_lab.worker.declarations import Declarations
from tests.server.conftest import TOKENS, Server, gone, start
from tests.server.test_served import GREEDY, PARIS, TOWER, text_of

pytestmark = pytest.mark.engine

#: Where whoever unpickles it would leave a mark: a folder that a jailed worker writes to.
MARK = Path("/dev/shm/nnsight-lab-was-unpickled")


class Evil:
    def __reduce__(self):
        return (MARK.touch, ())


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("strict")
    server = start(folder, "--level=strict", f"--audit={folder / 'audit.jsonl'}")
    yield server
    processes = server.processes()
    server.process.terminate()
    left = gone(processes, 30)
    for one in left:
        one.kill()
    server.process.wait(timeout=10)
    assert not left


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

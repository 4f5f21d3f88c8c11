"""A shared engine from day to day: turns, limits, figures, admins, blocks that never end, engines that die.

One server for all of it; the last test ends it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nnsight_lab.cli.main import main
from nnsight_lab.engine.call import Call
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import EngineDied, ServerError, TraceError
from nnsight_lab.wire.serving import PREFIX
from nnsight_lab.wire.step_figures import StepFigures
from tests.server.conftest import TOKENS, gone, start
from tests.server.test_served import GREEDY, PARIS, TOWER, mute, text_of
from tests.waiting import in_background, until

pytestmark = pytest.mark.engine

METRICS_TOKEN = "metrics-0123456789abcdef"
RESTART_S = 240
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ops")
    token = folder / "metrics.token"
    token.write_text(METRICS_TOKEN)
    server = start(
        folder,
        "--max-num-seqs=4",
        "--limit=requests=12",
        "--step-limit=3",
        "--restarts=1",
        f"--metrics-token={token}",
    )
    yield server
    processes = server.processes() if server.process.poll() is None else []
    server.process.kill()
    server.process.wait()
    assert gone(processes, 20) == []


@pytest.fixture
def attach(ops):
    engines = []

    def attached(user="alice"):
        engine = RemoteEngine(f"{user.strip('*')}-{len(engines)}", ops.url, TOKENS[user])
        engine.start()
        engines.append(engine)
        return engine

    yield attached
    for engine in engines:
        engine.stop()


def flood(engine, count=12):
    """Long requests of a user, as many as they may have; and what ends them."""
    calls = [Call([engine.request("Once", LONG, ())]) for _ in range(count)]
    for call in calls:
        engine.submit(call)
    return calls


def told(ops):
    """What the server wrote about itself."""
    lines = ops.log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"at"')]


def ready(ops):
    with ops.http(None) as http:
        return http.get("/ready").status_code == 200


def test_a_flood_of_one_user_hardly_delays_anothers_short_request(attach, ops):
    alice, bob = attach(), attach("bob")
    model = bob.model

    def generated():
        bob.generate("The", max_tokens=30, ignore_eos=True)

    def traced():
        with bob.trace("The", max_tokens=30, ignore_eos=True):
            hidden = model.model.layers[3].output[0].save()  # noqa: F841

    def seconds(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    for work in (generated, traced):
        work()
        alone = statistics.median(seconds(work) for _ in range(3))
        flood(alice)
        until(lambda: running(ops, "alice") == 3, 30, "the flood")
        beside = statistics.median(seconds(work) for _ in range(3))
        assert running(ops, "alice") == 3  # it went on all the while
        alice.abort_all()
        until(lambda: ops.figures()["requests"] == 0, 30, "none left")
        # Delayed by at most two of its own run times.
        assert beside <= 3 * alone, f"{work.__name__}: alone {alone:.2f} s, beside a flood {beside:.2f} s"


def running(ops, user):
    """How many requests of a user run."""
    with ops.http("*root") as http:
        found = http.get(f"{PREFIX}/admin/requests").raise_for_status().json()
    return sum(one["state"] == "running" and one["owner"] == user for one in found)


def test_a_flood_of_openai_requests_takes_turns_too_and_names_no_priority_of_its_own(attach, ops):
    bob = attach("bob")
    body = {"model": "demo", "prompt": "Once", **LONG, "priority": -1000}

    async def flooding():
        async with httpx.AsyncClient(base_url=ops.url, timeout=120) as http:
            headers = {"Authorization": f"Bearer {TOKENS['alice']}", "X-Vllm-Priority": "-1000"}
            streams = [http.post("/v1/completions", json=body, headers=headers) for _ in range(10)]
            tasks = [asyncio.ensure_future(stream) for stream in streams]
            await asyncio.to_thread(until, lambda: running(ops, "alice") == 3, 30, "the flood")
            outputs = await asyncio.to_thread(bob.generate, "The", max_tokens=3, ignore_eos=True)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return outputs

    assert len(asyncio.run(flooding())[0].outputs[0].token_ids) == 3
    until(lambda: ops.figures()["requests"] == 0, 30, "none left")


def test_one_request_too_many_is_refused_in_plain_words(attach, ops):
    alice = attach()
    alice.generate("One", max_tokens=1)
    flood(alice, 12)
    until(lambda: ops.figures()["requests"] == 12, 30, "all of them")
    words = r"alice has 12 requests running or waiting; the limit is 12\. Try again in \d+ s\."
    with pytest.raises(ServerError, match=words) as raised:
        alice.generate("One", max_tokens=1)
    assert (raised.value.status, raised.value.retry_after_s >= 1) == (429, True)
    with openai.OpenAI(base_url=f"{ops.url}/v1", api_key=TOKENS["alice"], max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="alice has 12 requests") as refused:
            client.completions.create(model="demo", prompt="One", max_tokens=1)
        assert int(refused.value.response.headers["retry-after"]) >= 1
    alice.abort_all()
    until(lambda: ops.figures()["requests"] == 0, 30, "none left")
    with pytest.raises(ServerError, match=r"at most 128 answers here, not n=200"):
        alice.generate("One", n=200, temperature=1.0, max_tokens=1)


def metrics(ops, token):
    """The page of metrics as Prometheus reads it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(f"{ops.url}/metrics", headers=headers)
    if answer.status_code != 200:
        return answer.status_code
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("user"), sample.labels.get("kind")] = sample.value
    return found


def test_metrics_tell_users_apart_to_those_who_may_read_them(attach, ops):
    bob = attach("bob")
    before = metrics(ops, METRICS_TOKEN)
    edit = mute(bob)
    tokens = sum(len(one.outputs[0].token_ids) for one in bob.generate(["The", "One"], max_tokens=5))
    with pytest.raises(ServerError):
        bob.generate("One", n=200, temperature=1.0)
    after = metrics(ops, METRICS_TOKEN)

    def more(name, kind=None):
        key = (f"nnsight_lab_{name}", "bob", kind)
        return after[key] - before.get(key, 0)

    assert more("requests_total") == 2
    assert more("tokens_total", "generated") == tokens
    assert more("tokens_total", "prompt") == 2
    assert more("saved_bytes_total") > 0
    assert (more("edits"), after["nnsight_lab_leases", "bob", None]) == (1, 1)
    assert after["nnsight_lab_ready", None, None] == 1
    assert any(name.startswith("vllm:") for name, _, _ in after)
    # No step replays on a CPU, so there is nothing to count; see `test_step_figures`.
    assert not any(name.startswith("nnsight_lab_steps") for name, _, _ in after)
    assert metrics(ops, TOKENS["*root"])
    assert metrics(ops, TOKENS["alice"]) == 404
    assert metrics(ops, "") == 401
    # It opens nothing else.
    assert httpx.get(f"{ops.url}/v1/models", headers={"Authorization": f"Bearer {METRICS_TOKEN}"}).is_error
    edit.clear()


def test_a_user_is_told_how_the_engines_steps_ran(attach):
    bob = attach("bob")
    assert bob.steps(wait_s=10) == StepFigures(graphs=False)
    assert bob.status().steps == "no graphs on a CPU"
    with bob.trace("The", max_tokens=3, ignore_eos=True) as tracer:
        hidden = bob.model.model.layers[3].mlp.output.save()  # noqa: F841
    assert str(tracer.steps) == "no graphs on a CPU"


def test_an_admin_lists_ends_and_publishes_from_the_terminal(attach, ops, capsys, monkeypatch, tmp_path):
    alice, bob = attach(), attach("bob")

    def admin(*words, token="*root"):
        monkeypatch.setenv("NNSIGHT_LAB_TOKEN", TOKENS[token])
        code = main(["admin", ops.url, *words])
        shown = capsys.readouterr()
        return (json.loads(shown.out) if "--json" in words else shown.out) if code == 0 else shown.err

    mute(alice, "loud")
    (edit,) = admin("edits", "--json")
    assert (edit["owner"], edit["name"], edit["published"]) == ("alice", "loud", False)
    assert "loud" in admin("edits")
    assert text_of(bob) == PARIS
    admin("publish", "alice", edit["id"])
    body = {"model": "demo", "prompt": TOWER, **GREEDY}
    with ops.http("bob") as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] != PARIS
        admin("unpublish", "alice", edit["id"])
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == PARIS
    call = flood(alice, 1)[0]
    until(lambda: running(ops, "alice") == 1, 30, "it runs")
    (request,) = admin("requests", "--json")
    assert request["owner"] == "alice"
    assert "is aborted" in admin("end-request", request["id"])
    call.future.result(timeout=30)
    flood(alice, 2)
    until(lambda: ops.figures()["requests"] == 2, 30, "both")
    (lease,) = [one for one in admin("leases", "--json") if one["owner"] == "alice"]
    assert "is ended" in admin("end-lease", "alice", lease["id"])
    until(lambda: (ops.figures()["requests"], admin("edits", "--json")) == (0, []), 30, "all of hers is gone")
    assert "not an admin's" in admin("leases", token="alice")
    assert "no lease" in admin("end-lease", "alice", "nope")
    assert admin("leases", "--json", token="*root")  # bob's goes on
    token = tmp_path / "token"
    token.write_text(TOKENS["*root"] + "\n")
    monkeypatch.delenv("NNSIGHT_LAB_TOKEN")
    assert main(["admin", ops.url, "--token-file", str(token), "leases"]) == 0
    assert [done["by"] for done in told(ops) if done["nnsight_lab"] == "lease ended"] == ["root"]


def test_a_block_that_never_ends_is_broken_off_and_named_in_the_log(attach, ops):
    alice, bob = attach(), attach("bob")
    model = alice.model

    def theirs():
        until(lambda: running(ops, "alice") == 1, 30, "the block runs")
        return text_of(bob)

    waiting = in_background(theirs)
    with (
        pytest.raises(TraceError, match="held up everybody for longer than this server lets") as raised,
        alice.trace(TOWER, max_tokens=1),
    ):
        model.model.layers[3].output[0].mean()
        while True:
            pass
    assert "while True" in str(raised.value)
    assert waiting() == PARIS
    assert text_of(alice) == PARIS
    assert [one["user"] for one in told(ops) if one["nnsight_lab"] == "block broken off"] == ["alice"]
    assert ops.figures()["deaths"] == 0


def test_a_dead_engine_is_started_again_with_everybodys_edits(attach, ops):
    alice, root, bob = attach(), attach("*root"), attach("bob")
    mute(alice)
    published = mute(root, "for_all")
    with ops.http("*root") as http:
        http.patch(f"{PREFIX}/edits/{published._current.id}", json={"published": True}).raise_for_status()
    changed = text_of(alice, edits=["mute"])
    assert changed != PARIS
    before = ops.processes()
    worker = next(one for one in before if one.cmdline()[0].startswith("VLLM::Worker"))
    running = in_background(lambda: bob.generate("Once", **LONG))
    body = {"model": "demo", "prompt": "Once", **LONG}

    def completion():
        with ops.http() as http:
            return http.post("/v1/completions", json=body)

    plain = in_background(completion)
    until(lambda: ops.figures()["requests"] == 2, 30, "both requests")
    worker.kill()
    with pytest.raises(EngineDied, match="is being started again, and keeps your edits") as raised:
        running()
    assert len(str(raised.value).splitlines()) == 1
    answer = plain()
    assert answer.status_code == 503, answer.text
    assert "is being started again" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    with ops.http(None) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
    with pytest.raises(ServerError, match=r"The engine died .* is being started again") as refused:
        bob.generate("One")
    assert refused.value.status == 503
    assert not gone([one for one in before if one.pid != ops.process.pid and _of_engine(one)], 20)
    until(lambda: ready(ops), RESTART_S, "the engine is back")
    # The kernels go on: attached as they were, with what they had installed.
    assert text_of(alice, edits=["mute"]) == changed
    assert text_of(alice, edits=[]) == PARIS
    body = {"model": "demo", "prompt": TOWER, **GREEDY}
    with ops.http("bob") as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] != PARIS
    published.clear()
    assert text_of(bob) == PARIS
    model = bob.model
    with bob.trace(TOWER, max_tokens=1):
        hidden = model.model.layers[3].output[0].save()
    assert hidden.shape == (9, 576)
    assert (ops.figures()["deaths"], ops.figures()["leases"]) == (1, 3)


def _of_engine(process):
    try:
        return process.cmdline()[:1] != [] and process.cmdline()[0].startswith("VLLM")
    except psutil.Error:
        return True


def test_a_block_that_cannot_be_broken_off_costs_its_engine_and_too_many_deaths_the_server(attach, ops):
    alice, bob = attach(), attach("bob")
    processes = ops.processes()
    model = alice.model

    def theirs():
        until(lambda: running(ops, "alice") == 1, 30, "the block runs")
        return text_of(bob)

    waiting = in_background(theirs)
    with pytest.raises(EngineDied, match="a block held it up for"), alice.trace(TOWER, max_tokens=1):
        model.model.layers[3].output[0].mean()
        while True:
            try:
                while True:
                    pass
            except BaseException:
                continue
    with pytest.raises((EngineDied, ServerError)):
        waiting()
    # Whose it was stands in the log, and is not told to everybody.
    assert [one["users"] for one in told(ops) if one["nnsight_lab"] == "worker killed"] == [["alice"]]
    # It was the second death, and one may be mended here.
    assert ops.process.wait(timeout=60) == 1
    assert gone(processes, 20) == []
    lines = ops.log.read_text(errors="replace").splitlines()
    assert any(line.startswith("nnsight-lab: The engine died 2 times in 10 minutes") for line in lines)

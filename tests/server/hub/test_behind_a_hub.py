"""The engine as the service of a real JupyterHub: who gets in, what two users have, what survives a restart.

In this order: what follows ends tokens, then the Hub, then the engine.
"""

from __future__ import annotations

import os
import time

import httpx
import openai
import pytest

import nnsight_lab as lab
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import EngineDied, ServerError
from nnsight_lab.wire.serving import PREFIX
from tests.server.hub.behind import BODY_BYTES
from tests.waiting import in_background, until

pytestmark = [pytest.mark.engine, pytest.mark.notebook]

SCOPE = "access:services!service=nnsight-lab"
#: A token that was revoked is refused within this, whatever runs under it.
ENDS_S = 30
TRACE = """%%trace "The Eiffel Tower is in the city of", max_tokens=3, temperature=0
hidden = (model.model.layers[{layer}].output[0] * 0 + {layer}).save()
"""
EDIT = "%%edit probe\nscore = (model.model.layers[1].output[0].float().mean() * 0 + {mark}).save()\n"
OPENAI = """import openai, os
from safetensors.torch import load
import httpx
headers = {"Authorization": "Bearer " + os.environ["JUPYTERHUB_API_TOKEN"]}
mine = os.environ["JUPYTERHUB_API_TOKEN"]
with openai.OpenAI(base_url=engine.url + "/v1", api_key=mine, max_retries=0) as client:
    answer = client.completions.create(model="demo", prompt="One", max_tokens=1)
saved = load(httpx.get(f"{engine.url}/v1/lab/saves/{answer.id}", headers=headers).raise_for_status().content)
"""
LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}


def who(hub, token):
    """What the engine says of a token."""
    with hub.http(token) as http:
        answer = http.get(f"{PREFIX}/health")
    return answer.status_code, answer.json()


def refusal(answer):
    code, told = answer
    return code, told["error"]["message"]


def figures(hub, token):
    code, told = who(hub, token)
    assert code == 200
    return told


@pytest.fixture(scope="module")
def root(behind):
    return behind.hub.token("root")["token"]


def test_the_hub_says_who_is_who(behind):
    hub = behind.hub
    assert refusal(who(hub, ""))[0] == 401
    code, text = refusal(who(hub, "0" * 32))
    assert code == 403
    assert "not one that may use this service" in text
    for token in (hub.token("carol"), hub.token("alice", "access:servers!user=alice")):
        code, text = refusal(who(hub, token["token"]))
        assert code == 403
        assert SCOPE in text
        assert "server_token_scopes" in text
    known = {}
    for user in ("alice", "bob", "teacher", "root", "service:tests"):
        code, told = who(hub, hub.token(user)["token"])
        assert code == 200
        known[user] = told["user"], told["admin"]
    # The engine's admins: those of the group, and the Hub's own.
    assert known == {
        "alice": ("alice", False),
        "bob": ("bob", False),
        "teacher": ("teacher", True),
        "root": ("root", True),
        "service:tests": ("user:service:tests", False),  # a user, called like
        # ... this service:
    }
    assert who(hub, hub.tests_token)[1]["user"] == "service:tests"
    assert who(hub, hub.token("alice", SCOPE)["token"])[1]["user"] == "alice"


def test_what_is_not_for_users_is_not_there_through_the_proxy(behind):
    hub = behind.hub
    with hub.http(hub.token("alice")["token"]) as http:
        paths = (
            "/docs",
            "/openapi.json",
            "/metrics",
            "/v1/load_lora_adapter",
            "/hub/api/users",
            "//v1/models",
        )
        assert {path: http.get(path).status_code for path in paths} == dict.fromkeys(paths, 404)
        assert http.get("/v1/models").json()["data"][0]["id"] == "demo"


@pytest.mark.parametrize("mib", [9, 100])
def test_a_body_that_is_too_large_is_refused_through_the_proxy(behind, mib):
    hub = behind.hub
    with hub.http(hub.token("alice")["token"]) as http:
        answer = http.post(f"{PREFIX}/edits", content=b"0" * (mib * 2**20))
        assert answer.status_code == 413
        assert "is the most here" in answer.json()["error"]["message"]
        within = http.post(f"{PREFIX}/edits", content=b"0" * (BODY_BYTES - 2**20))
        assert (within.status_code, "cannot be read" in within.text) == (400, True)
        chunks = http.post(f"{PREFIX}/edits", content=(b"0" * 2**20 for _ in range(9)))  # no length is said
        assert chunks.status_code == 413


def test_only_an_admin_of_the_hub_or_of_the_group_publishes(behind, root):
    hub = behind.hub
    engines = {
        user: RemoteEngine(user, hub.service, hub.token(user)["token"]).start()
        for user in ("alice", "teacher")
    }
    try:
        for user, engine in engines.items():
            model = engine.model
            with engine.edit(f"of-{user}"):
                note = model.model.layers[0].output[0].float().sum().save()  # noqa: F841
        answers = {}
        for user, engine in engines.items():
            with hub.http(engine._token) as http:
                mine = next(edit for edit in http.get(f"{PREFIX}/edits").json() if edit["mine"])
                answers[user] = http.patch(
                    f"{PREFIX}/edits/{mine['id']}", json={"published": True}
                ).status_code
        assert answers == {"alice": 403, "teacher": 200}
        bob = hub.token("bob")["token"]
        with hub.http(bob) as http:
            seen = [edit["name"] for edit in http.get(f"{PREFIX}/edits").json()]
            body = {"model": "demo", "prompt": "One", "max_tokens": 1}
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            saved = http.get(f"{PREFIX}/saves/{answer['id']}")
        assert seen == ["of-teacher"]
        assert saved.status_code == 200
        assert b"of-teacher/note" in saved.content
        assert b"of-alice" not in saved.content
    finally:
        with hub.http(engines["teacher"]._token) as http:
            for edit in http.get(f"{PREFIX}/edits").json():
                http.delete(f"{PREFIX}/edits/{edit['id']}")
        for engine in engines.values():
            engine.stop()
    until(lambda: figures(hub, root)["edits"] == 0, 10, "the edits are gone")


def test_two_users_cells_of_the_same_names_never_mix(behind):
    ran = []
    for kernel, mark in ((behind.alice, 3), (behind.bob, 5)):
        kernel.good("%load_ext nnsight_lab\nimport nnsight_lab as lab, os")
        # No address and no token: this Hub's engine, and this server's token.
        ran.append(kernel.good("%engine attach"))
        assert "attached to" in ran[-1].texts[-1]
        ran.append(kernel.good(EDIT.format(mark=mark)))
    cells = [
        (kernel, kernel.submit(TRACE.format(layer=mark)))
        for kernel, mark in ((behind.alice, 3), (behind.bob, 5))
    ]
    ran += [kernel.finish(sent) for kernel, sent in cells]  # both at once
    for kernel, mark, name in ((behind.alice, 3, "alice"), (behind.bob, 5, "bob")):
        assert kernel.value("engine.served.user") == name
        assert kernel.value("(hidden.unique().tolist(), tuple(hidden.shape))") == ([mark], (9, 576))
        assert kernel.value("lab.generate('One', max_tokens=1)[0].saves['score'].item()") == mark
        ran.append(kernel.good(OPENAI))
        assert kernel.value("{name: value.item() for name, value in saved.items()}") == {"probe/score": mark}
        ran.append(kernel.good("%engine status"))
        ran.append(kernel.good("display(engine, vars(engine), engine.config)"))
    # What a cell showed, and what the logs say, holds no token.
    tokens = [kernel.value("os.environ['JUPYTERHUB_API_TOKEN']") for kernel in (behind.alice, behind.bob)]
    shown = "\n".join(str(one.messages) for one in ran)
    logs = behind.hub.engine_log.read_text(errors="replace") + behind.hub.log.read_text(errors="replace")
    assert [token for token in tokens if token in shown + logs] == []
    # Neither finds anything of the other's.
    bob = "httpx.get(f'{engine.url}/v1/lab/edits', headers=headers).json()"
    assert behind.bob.value(f"[(e['owner'], e['name']) for e in {bob}]") == [("bob", "probe")]
    other = behind.alice.value("answer.id")
    assert (
        behind.bob.value(f"httpx.get(f'{{engine.url}}/v1/lab/saves/{other}', headers=headers).status_code")
        == 404
    )


@pytest.mark.parametrize(
    ("address", "environment", "words"),
    [
        ("", {"JUPYTERHUB_API_TOKEN": "carol"}, [SCOPE, "c.Spawner.server_token_scopes"]),
        ("", {"NNSIGHT_LAB_URL": ""}, ["ask its admin to set NNSIGHT_LAB_URL in c.Spawner.environment"]),
        ("{hub}/services/nothing", {}, ["there is no shared engine at this address"]),
        # Not known to be the Hub's, so it is not given the Hub's token.
        ("{service}", {"NNSIGHT_LAB_URL": ""}, ["has no token", "JupyterHub's token was not sent"]),
        ("{service}", {"NNSIGHT_LAB_TOKEN": "0" * 32}, ["not one that may use this service"]),
        ("{service} token=secret", {}, ["A token that stands in a cell is saved with the notebook"]),
    ],
)
def test_what_is_refused_is_one_line_that_says_what_to_ask_for(behind, address, environment, words):
    hub, alice = behind.hub, behind.alice
    given = {
        name: hub.token("carol")["token"] if value == "carol" else value
        for name, value in environment.items()
    }
    alice.good(f"import os\nbefore = dict(os.environ)\nos.environ.update({given!r})")
    address = address.format(hub=hub.url, service=hub.service)
    error = alice.run(f"%engine attach {address} name=other").error
    alice.good("os.environ.clear()\nos.environ.update(before)")
    assert [word for word in words if word not in error] == []
    assert "Traceback" not in error
    assert "<html" not in error
    assert len(error.strip().splitlines()) <= 2  # one line, and how IPython begins it


def test_no_process_of_the_engine_has_a_secret_and_no_payload_has_one(behind, monkeypatch):
    hub = behind.hub
    for process in behind.processes():
        with open(f"/proc/{process.pid}/environ", "rb") as given:
            environment = given.read()
        assert hub.service_token.encode() not in environment
        assert b"JUPYTERHUB_API_TOKEN" not in environment or b"JUPYTERHUB_API_TOKEN=\0" in environment
    token = hub.token("alice")["token"]
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", token)
    monkeypatch.setenv("NNSIGHT_LAB_URL", hub.service)
    monkeypatch.delenv("NNSIGHT_LAB_TOKEN", raising=False)
    bodies = []
    engine = lab.attach(name="recorded")
    try:
        engine._remote._http.event_hooks["request"].append(lambda asked: bodies.append(asked.read()))
        model = engine.model
        with engine.edit("probe"):
            norm = model.model.layers[1].output[0].norm().save()  # noqa: F841
        with engine.trace("One", max_tokens=2):
            names = sorted(name for name in os.environ if "TOKEN" in name or "SERVE" in name)
            names.save()
    finally:
        lab.stop("recorded")
    assert len(bodies) >= 2
    assert all(token.encode() not in body for body in bodies)
    assert [name for name in names if name.startswith(("JUPYTERHUB", "JPY", "NNSIGHT_LAB"))] == []
    assert token not in f"{engine!r} {engine.config} {vars(engine._remote)}"


def test_a_token_that_ends_ends_what_runs_under_it(behind, root):
    hub = behind.hub
    streaming, waiting, tracing = (hub.token("bob"), hub.token("service:tests"), hub.token("alice"))
    stopped = behind.bob.value("os.environ['JUPYTERHUB_API_TOKEN']")
    assert who(hub, stopped)[0] == 200
    engine = RemoteEngine("tracing", hub.service, tracing["token"])
    engine.start()

    def stream():
        with openai.OpenAI(base_url=f"{hub.service}/v1", api_key=streaming["token"], max_retries=0) as client:
            parts = 0
            with client.completions.create(
                model="demo",
                prompt="Once",
                stream=True,
                max_tokens=900,
                temperature=0,
                extra_body={"ignore_eos": True},
            ) as answer:
                for _ in answer:
                    parts += 1
        return parts

    def completion():
        with openai.OpenAI(base_url=f"{hub.service}/v1", api_key=waiting["token"], max_retries=0) as client:
            return client.completions.create(
                model="demo", prompt="Once", max_tokens=900, temperature=0, extra_body={"ignore_eos": True}
            )

    def trace():
        model = engine.model
        with engine.trace("Once", **LONG) as tracer:
            for _ in tracer.iter[:]:
                time.sleep(0.06)  # so that nothing here is over before its token is
                model.model.layers[0].output[0]

    running = [in_background(work) for work in (trace, stream, completion)]
    until(lambda: figures(hub, root)["requests"] == 3, 60, "all three run")
    for user, token in (("bob", streaming), ("service:tests", waiting), ("alice", tracing)):
        hub.ask("DELETE", f"/users/{user}/tokens/{token['id']}")
    hub.ask("DELETE", "/users/bob/server")
    until(lambda: figures(hub, root)["requests"] == 0, ENDS_S, "what ran under them is over")
    until(lambda: hub.ask("GET", "/users/bob")["servers"] == {}, 120, "the Hub has stopped his server")
    until(lambda: who(hub, stopped)[0] == 403, ENDS_S, "a stopped server's token is refused")
    traced, streamed, completed = running
    with pytest.raises((ServerError, EngineDied), match="not one that may use this service"):
        traced()
    with pytest.raises(openai.APIError, match="The token was revoked, or its server stopped"):
        streamed()
    with pytest.raises(openai.PermissionDeniedError, match="The token was revoked, or its server stopped"):
        completed()
    assert who(hub, tracing["token"])[0] == 403
    until(lambda: engine.state()[0] == "dead", ENDS_S, "its kernel knows")
    engine.stop()
    until(lambda: figures(hub, root)["leases"] == 1, ENDS_S, "alice's kernel alone is left")


def test_a_hub_that_restarts_takes_nobody_away(behind):
    hub = behind.hub
    mine = behind.alice.value("os.environ['JUPYTERHUB_API_TOKEN']")
    assert who(hub, mine)[0] == 200
    hub.stop()
    code, text = refusal(who(hub, "f" * 32))
    assert code == 503
    assert "The JupyterHub does not answer" in text
    assert behind.alice.good(TRACE.format(layer=7)).ok
    assert behind.alice.value("hidden.unique().tolist()") == [7]
    hub.start()
    asked = 0

    def back():
        nonlocal asked
        asked += 1
        assert who(hub, mine)[0] == 200
        try:
            return httpx.get(f"{hub.api}/", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    until(back, 120, "the Hub is back")
    hub.ready()
    assert asked > 1
    until(lambda: who(hub, hub.token("alice")["token"])[0] == 200, 30, "new tokens are known")
    assert behind.alice.good("%engine status").ok


def test_an_engine_that_restarts_is_attached_again_with_its_edits(behind):
    alice = behind.alice
    behind.end_engine()
    error = alice.run(TRACE.format(layer=2)).error
    assert "<" not in error.replace("<module>", "")
    assert "the proxy answers, and no engine behind it" in error
    behind.engine = behind.hub.serve()
    behind.hub.served(behind.engine)
    alice.good("%engine attach")
    assert alice.value("lab.generate('One', max_tokens=1)[0].saves['score'].item()") == 3
    alice.good(TRACE.format(layer=2))
    assert alice.value("hidden.unique().tolist()") == [2]

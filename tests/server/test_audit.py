"""The audit log: every act and every refusal, and nothing that is anybody's own."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import ServeRefused
from nnsight_lab.server import notes
from nnsight_lab.server.audit import Audit, audit, refused
from nnsight_lab.server.guard import Guard
from nnsight_lab.server.identity import Tokens
from nnsight_lab.server.limits import Limits
from nnsight_lab.wire.serving import PREFIX
from tests.server.conftest import TOKENS
from tests.server.test_served import GREEDY, TOWER
from tests.waiting import until

FIELDS = {"time", "user", "action", "object", "decision", "reason"}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def own(tmp_path):
    found = Audit()
    found.open(tmp_path / "audit.jsonl")
    yield found, tmp_path / "audit.jsonl"
    found.close()


def test_a_line_says_who_did_what_when_and_is_its_owners_alone(own):
    log, path = own
    log.note("edit install", "alice", "edit-1", nbytes=5)
    (line,) = lines(path)
    assert set(line) == {*FIELDS, "counts"}
    assert (line["user"], line["action"], line["object"], line["decision"]) == (
        "alice",
        "edit install",
        "edit-1",
        "done",
    )
    assert line["counts"] == {"nbytes": 5}
    assert line["time"].endswith("+00:00")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_client_says_is_bounded_escaped_and_not_quoted(own):
    log, path = own
    log.note("x", "a" * 5000, 'b\n{"user": "root"}', why="No edit is called 'my secret' or \"another\".")
    assert len(path.read_text().splitlines()) == 1
    (line,) = lines(path)
    assert len(line["user"]) == 100
    assert line["reason"] == "No edit is called '…' or '…'."


def test_a_file_that_was_moved_away_is_opened_anew(own):
    log, path = own
    log.note("one", "alice")
    path.rename(path.with_suffix(".1"))
    log.note("two", "alice")
    assert [line["action"] for line in lines(path)] == ["two"]
    path.unlink()
    log.note("three", "alice")
    assert [line["action"] for line in lines(path)] == ["three"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_cannot_be_written_fails_nobody_and_is_said_once(own, capfd):
    log, path = own
    path.unlink()
    path.mkdir()
    for _ in range(3):
        log.note("one", "alice")
    assert log.missed == 3
    assert capfd.readouterr().err.count("the audit log cannot be written") == 1
    path.rmdir()
    log.note("two", "alice")
    assert [line["action"] for line in lines(path)] == ["two"]
    log.note("odd", "alice", value=object())
    assert log.missed == 4


def test_lines_of_many_threads_are_whole(own):
    log, path = own
    threads = [
        threading.Thread(target=lambda: [log.note("x", "alice", "y" * 90) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 800


def test_a_file_that_cannot_be_made_ends_the_start(tmp_path):
    with pytest.raises(ServeRefused, match=r"--audit .*audit cannot be written: No such file"):
        Audit().open(tmp_path / "not-there" / "audit")


def test_a_secret_is_taken_out_of_a_refusal_wherever_it_stands(tmp_path):
    audit.open(tmp_path / "audit")
    try:
        refused(
            "", "GET", "/v1/lab/edits/s3cret-token", 401, "The token s3cret-token is not one.", "s3cret-token"
        )
    finally:
        audit.close()
    assert "s3cret-token" not in (tmp_path / "audit").read_text()


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_refusal_is_written_before_its_client_hears_of_it(kind, tmp_path):
    path = tmp_path / "audit"
    heard = []

    async def send(message):
        heard.append((message["type"], [line["object"] for line in lines(path)]))

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    guard = Guard(None, identity=Tokens({}), limits=Limits())
    scope = {"type": kind, "method": "GET", "path": "/docs", "headers": []}
    audit.open(path)
    try:
        asyncio.run(guard(scope, receive, send))
    finally:
        audit.close()
    assert len(heard) == 2
    assert [seen for _, seen in heard] == [["GET /docs"]] * 2
    (line,) = lines(path)
    assert line["counts"]["status"] == (401 if kind == "http" else 404)


@pytest.mark.engine
def test_a_server_writes_what_its_users_do_and_every_refusal(strict):
    path = strict.log.parent / "audit.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret_prompt = "My password is hunter2 and"
    alice = RemoteEngine("alice", strict.url, TOKENS["alice"])
    alice.start()
    lease = alice._remote.lease
    edit = alice.edit("steer", steps=[lab.steps.add("model.layers.3", torch.full((576,), 0.123456))])
    edit_id = edit._current.id
    alice.generate(secret_prompt, **GREEDY)
    before = len(lines(path))
    with strict.http("bob") as bob:
        theirs = [
            ("PATCH", f"/edits/{edit_id}"),
            ("PATCH", "/edits/not-there"),
            ("POST", f"/leases/{lease}/peek"),
            ("DELETE", f"/leases/{lease}/calls/abc"),
            ("GET", "/saves/cmpl-abc"),
            ("DELETE", "/steps/steer"),
            ("GET", "/nothing"),
        ]
        for method, route in theirs:
            answer = bob.request(method, f"{PREFIX}{route}", json={"on": False})
            assert answer.status_code in (400, 404), (method, route, answer.status_code)
        assert bob.get("/metrics").status_code == 404
        assert bob.get("/docs").status_code == 404
        assert bob.delete(f"{PREFIX}/edits/{edit_id}").status_code == 204
        done = bob.post("/v1/completions", json={"model": "demo", "prompt": secret_prompt, **GREEDY}).json()
        assert bob.post("/v1/completions", json={"model": "other", "prompt": "x"}).status_code == 404
    with strict.http(None) as nobody:
        assert nobody.get(f"{PREFIX}/edits").status_code == 401
        wrong = {"Authorization": "Bearer wrong-but-secret"}
        assert nobody.get(f"{PREFIX}/edits/wrong-but-secret", headers=wrong).status_code == 403
    with strict.http("alice") as http:
        assert http.patch(f"{PREFIX}/edits/{edit_id}", json={"published": True}).status_code == 403
        assert http.patch(f"{PREFIX}/edits/{edit_id}", json={"user": True}).status_code == 400
        huge = {"Content-Length": str(2**40)}
        assert http.build_request("POST", "/v1/completions", headers=huge) is not None
    edit.clear()
    alice.stop()
    until(lambda: any(line["action"] == "lease end" and line["object"] == lease for line in lines(path)), 20)

    found = lines(path)
    new = found[before:]
    said = [(line["user"], line["action"], line["object"], line["decision"]) for line in found]
    for one in [
        ("alice", "attach", lease, "done"),
        ("alice", "edit install", edit_id, "done"),
        ("bob", "edit clear", edit_id, "unknown"),
        ("alice", "edit clear", edit_id, "done"),
        ("alice", "lease end", lease, "done"),
    ]:
        assert one in said, one
    refusals = [
        (line["user"], line["object"], line["counts"]["status"])
        for line in new
        if line["decision"] == "refused"
    ]
    for method, route in theirs:
        assert any(
            user == "bob" and what == f"{method} {PREFIX}{route}"[:100] for user, what, _ in refusals
        ), route
    for one in [
        ("bob", "GET /metrics", 404),
        ("bob", "GET /docs", 404),
        ("bob", "POST /v1/completions", 404),
        ("", f"GET {PREFIX}/edits", 401),
        ("", f"GET {PREFIX}/edits/…", 403),
        ("alice", f"PATCH {PREFIX}/edits/{edit_id}", 403),
    ]:
        assert one in refusals, one
    (begun,) = [line for line in new if line["action"] == "request begin" and line["user"] == "bob"][:1]
    assert begun["object"].startswith(done["id"])
    ended = [line for line in new if line["action"] == "request end" and line["object"] == begun["object"]]
    assert [line["counts"]["generated_tokens"] for line in ended] == [4]
    assert ended[0]["counts"]["prompt_tokens"] > 0
    text = path.read_text()
    for secret in (
        *TOKENS.values(),
        "wrong-but-secret",
        "hunter2",
        "0.123456",
        done["choices"][0]["text"].strip(),
    ):
        assert secret not in text, secret
    assert strict.figures()["audit_missed"] == 0


@pytest.mark.engine
def test_a_server_goes_on_when_its_audit_log_was_rotated_or_cannot_be_written(strict):
    path = strict.log.parent / "audit.jsonl"
    moved = path.with_suffix(".1")
    path.rename(moved)
    with strict.http("bob") as bob:
        assert bob.get(f"{PREFIX}/saves/none").status_code == 404
        assert [line["action"] for line in lines(path)] == ["request"]
        path.unlink()
        path.mkdir()
        try:
            assert bob.get(f"{PREFIX}/saves/none").status_code == 404
            answer = bob.post("/v1/completions", json={"model": "demo", "prompt": TOWER, **GREEDY})
            assert answer.status_code == 200
        finally:
            path.rmdir()
            os.rename(moved, path)
    assert strict.figures()["audit_missed"] >= 2


def test_what_admins_do_and_what_befalls_the_engine_are_in_the_log_too(tmp_path, monkeypatch, capfd):
    found = Audit()
    found.open(tmp_path / "audit.jsonl")
    monkeypatch.setattr(notes, "audit", found)
    notes.note("lease ended", by="root", owner="alice", lease="l1")
    notes.note("engine died", cause="a process of it ended", deaths=1)
    found.close()
    first, second = lines(tmp_path / "audit.jsonl")
    assert (first["user"], first["action"], first["counts"]) == (
        "root",
        "lease ended",
        {"owner": "alice", "lease": "l1"},
    )
    assert (second["user"], second["action"]) == ("", "engine died")
    assert len(capfd.readouterr().err.splitlines()) == 2

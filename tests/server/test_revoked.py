"""A token that ends while its request runs, and a refused body: what the client hears, and that work ends."""

from __future__ import annotations

import asyncio
import json

import pytest

from nnsight_lab.server import revoked
from nnsight_lab.server.guard import Guard
from nnsight_lab.server.identity import Identity, User
from nnsight_lab.server.limits import Limits, Refused

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Ends(Identity):
    """Knows its user so many times, and then answers otherwise."""

    may_end = True

    def __init__(self, times: int, then: User | Refused | None = None) -> None:
        self.times = times
        self.then = then

    async def user(self, token: str) -> User | None:
        self.times -= 1
        found = User("alice") if self.times >= 0 else self.then
        if isinstance(found, Refused):
            raise found
        return found


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(revoked, "_AGAIN_S", 0.01)
    monkeypatch.setattr(revoked, "_LEAVE_S", 0.2)


def answered(app, identity, body=(b"",), headers=(), limits=None):
    """The messages that a request of the app is answered with, and how much of its body was read."""
    sent, read = [], 0

    async def run():
        parts = list(body)

        async def receive():
            nonlocal read
            if not parts:
                await asyncio.Event().wait()
            read += len(parts[0])
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "path": "/v1/completions",
            "headers": [(b"authorization", b"Bearer secret"), *headers],
        }
        guard = Guard(app, identity=identity, limits=limits or Limits())
        await asyncio.wait_for(guard(scope, receive, send), 20)

    asyncio.run(run())
    return sent, read


def text(sent):
    return b"".join(message.get("body", b"") for message in sent).decode()


def test_a_stream_is_told_why_it_ends_and_its_work_ends():
    ended = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    sent, _ = answered(app, Ends(3))
    first, last = text(sent).strip().split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 403
    assert sent[-1]["more_body"] is False
    assert ended == [True]


def test_a_handler_in_a_task_of_its_own_ends_too_and_what_it_answers_then_is_for_nobody():
    ended = []

    async def app(scope, receive, send):  # as vLLM's, which listen for their client beside their work
        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        working = asyncio.ensure_future(work())
        while (await receive())["type"] != "http.disconnect":
            pass
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    sent, _ = answered(app, Ends(2))
    assert sent[0]["status"] == 403
    assert "revoked" in text(sent)
    assert "null" not in text(sent).replace('"param":null', "")
    assert ended == [True]


def test_an_answer_of_a_promised_length_is_cut_off():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"123", "more_body": True})
        await asyncio.Event().wait()

    sent, _ = answered(app, Ends(2))
    assert text(sent) == "123"
    assert sent[-1]["more_body"] is True


@pytest.mark.parametrize("then", [Refused(503, "silent"), User("alice", admin=True)])
def test_a_hub_that_is_silent_ends_nothing(then):
    async def app(scope, receive, send):
        await asyncio.sleep(0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    sent, _ = answered(app, Ends(2, then))
    assert (sent[0]["status"], text(sent)) == (200, "done")


@pytest.mark.parametrize("then", [Refused(403, "lacks the scope"), User("bob")])
def test_a_token_that_is_another_s_or_may_less_ends(then):
    async def app(scope, receive, send):
        await asyncio.Event().wait()

    assert answered(app, Ends(2, then))[0][0]["status"] == 403


def test_an_error_of_the_app_is_its_own():
    async def app(scope, receive, send):
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        answered(app, Ends(9))


async def _reads(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    raise AssertionError("it is over the limit")


@pytest.mark.parametrize(
    ("headers", "identity", "status", "read"),
    [
        ([(b"content-length", b"100")], Ends(9), 413, 100),
        ([(b"transfer-encoding", b"chunked")], Ends(9), 413, 100),
        ([(b"content-length", b"100")], Ends(0), 403, 100),
        (
            [(b"content-length", b"100"), (b"expect", b"100-continue")],
            Ends(9),
            413,
            0,
        ),  # nothing was sent yet
        ([], Ends(0), 403, 0),
    ],
)
def test_what_is_left_of_a_refused_body_is_read_off(headers, identity, status, read):
    sent, seen = answered(_reads, identity, [b"0" * 10] * 10, headers, Limits(body_bytes=50, json_bytes=50))
    assert (sent[0]["status"], seen) == (status, read)

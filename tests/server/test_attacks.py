"""Attacks on a shared engine: the attacker gets an error, all others their answer, and nothing remains."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import time
from typing import Any

import httpx
import pytest

from nnsight_lab.errors import LabError
from nnsight_lab.wire.serving import PREFIX
from tests.server.conftest import TOKENS, Server
from tests.waiting import until

pytestmark = pytest.mark.engine

TOWER = "The Eiffel Tower is in the city of"
PARIS = " Paris, France."
COMPLETION = {"model": "demo", "prompt": TOWER, "max_tokens": 4, "temperature": 0}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": TOWER}], "max_tokens": 1}
#: Beside the fields that vLLM's requests have.
NO_FIELDS = ("extra_args", "extra_body", "lab_edits", "nnsight_edits", "user_id", "guided_json")
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 2**31, 2**63, 2**70, 1e308, -0.5, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x00", "../../etc/passwd", "x" * 100_000),
    *([], [None], [-1], [2**40], ["x"], [[1, 2]], {}, {"x": 1}, {"1": 1e400}, {"type": "json_object"}),
    *({"regex": "("}, {"json": {"$ref": "#"}}, {"nnsight_edits": {}}, {"lab_trace": "gASVBQAAAAAAAAA="}),
    json.loads("[" * 200 + "]" * 200),
)


def right(server: Server, user: str = "bob") -> bool:
    """Whether somebody else gets the right answer."""
    with server.http(user) as http:
        answer = http.post("/v1/completions", json=COMPLETION)
        return answer.is_success and answer.json()["choices"][0]["text"] == PARIS


def nothing_left(server: Server) -> None:
    """No request is running, or kept in the books."""
    until(lambda: server.figures()["requests"] == 0, 20, "a request is left in the server's books")


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_no_field_of_any_kind_ends_the_engine(server: Server, path: str, body: dict[str, Any]) -> None:
    """A sample of all pairs of field and value; each run has the same one."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    kind = ChatCompletionRequest if "chat" in path else CompletionRequest
    # How long an answer may become is a limit, tested as one: here it would only take its time.
    fields = sorted(
        {*kind.model_fields, *NO_FIELDS} - {"max_tokens", "max_completion_tokens", "thinking_token_budget"}
    )
    codes = set()
    with server.http("alice") as http:
        for field, value in random.Random(path).sample(list(itertools.product(fields, VALUES)), 150):
            # As Python writes it: NaN and infinities among the numbers, as no client of OpenAI's does.
            content = json.dumps({**body, field: value})
            try:
                answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
            except httpx.ReadError:  # vLLM closes the connection after an error of its own
                continue
            codes.add(answer.status_code)
    # 500 is how vLLM answers what its own checks do not foresee.
    assert codes <= {200, 400, 404, 413, 422, 429, 500}
    assert {200, 400} <= codes
    assert right(server)
    nothing_left(server)


def raw(server: Server, request: str, wait_s: float = 10.0) -> tuple[int, str]:
    """What bytes that no client would send are answered; 0 where there is no answer."""
    _, _, address = server.url.rpartition("/")
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as sent:
        sent.sendall(request.encode("latin-1"))
        found = b""
        # A server may also wait for more of what makes no sense.
        with contextlib.suppress(TimeoutError):
            while b"\r\n\r\n" not in found and (chunk := sent.recv(65536)):
                found += chunk
    line, _, rest = found.decode("latin-1").partition("\r\n")
    return int(line.split()[1]) if line else 0, rest


PATHS = (
    *("/metrics", "//metrics", "/metrics/", "/METRICS", "/health/../metrics", "/v1/lab/../../metrics"),
    *("/v1/lab/%2e%2e/%2e%2e/metrics", "/v1/lab/..%2f..%2fmetrics", "/%6detrics", "/health%2f..%2fmetrics"),
    *("/docs", "/openapi.json", "/v1/lab/openapi.json", "/health/x", "/ready/../docs", "/health;/../docs"),
    *("/v1/load_lora_adapter", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/pause", "/invocations"),
    *(
        "/v1/lab/saves/../leases/x",
        "/v1/lab/saves/%00",
        "http://elsewhere/metrics",
        "/v1/lab/saves/" + "x" * 9000,
    ),
)


@pytest.mark.parametrize("user", [None, "alice"])
def test_no_spelling_of_a_path_opens_what_is_not_served(server: Server, user: str | None) -> None:
    token = "" if user is None else f"Authorization: Bearer {TOKENS[user]}\r\n"
    opened = []
    for method, path in itertools.product(("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE"), PATHS):
        request = (
            f"{method} {path} HTTP/1.1\r\nHost: here\r\n{token}Content-Length: 0\r\nConnection: close\r\n\r\n"
        )
        status, text = raw(server, request)
        # To end what is not there is harmless, and says nothing.
        harmless = user is not None and method == "DELETE" and status == 204
        if status not in (400, 401, 403, 404, 405, 414, 431) and not harmless:
            opened.append((method, path[:60], status, text[:200]))
    assert opened == []


def test_what_a_client_says_of_itself_is_not_heard(server: Server) -> None:
    said = {
        **dict.fromkeys(("X-Forwarded-User", "X-Remote-User", "Remote-User", "X-User", "From"), "root"),
        **dict.fromkeys(("X-Api-Key", "Api-Key", "ndif-api-key"), TOKENS["*root"]),
        "Cookie": f"token={TOKENS['*root']}",
        "Forwarded": "for=127.0.0.1",
        "X-Vllm-Priority": "-1000",
        "X-Request-Id": "root/1",
    }
    with server.http("alice") as http:
        told = http.get(f"{PREFIX}/health", headers=said).json()
        assert (told["user"], told["admin"]) == ("alice", False)
        assert http.get("/metrics", headers=said).status_code == 404
        in_query = http.get(f"{PREFIX}/health", params={"token": TOKENS["*root"], "user": "root"}).json()
        assert in_query["user"] == "alice"
    with server.http(None) as http:
        assert http.get(f"{PREFIX}/health", headers=said).status_code == 401
        assert (
            http.get(f"{PREFIX}/health", headers={"Authorization": "Basic cm9vdDpyb290"}).status_code == 401
        )


def test_two_requests_with_one_id_are_two_requests(server: Server) -> None:
    twice = {**COMPLETION, "request_id": "same"}
    with server.http("alice") as alice, server.http("bob") as bob:
        answers = [
            http.post("/v1/completions", json=twice, headers={"X-Request-Id": "same"})
            for http in (alice, bob, alice)
        ]
    assert [one.json()["choices"][0]["text"] for one in answers] == [PARIS] * 3
    assert len({one.json()["id"] for one in answers}) == 3


def test_a_body_that_comes_too_slowly_is_given_up_and_others_are_answered_meanwhile(server: Server) -> None:
    _, _, address = server.url.rpartition("/")
    host, _, port = address.partition(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKENS['alice']}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
    )
    slow = [socket.create_connection((host, int(port)), timeout=60) for _ in range(20)]
    try:
        for one in slow:
            one.sendall(head.encode())
        assert right(server)
        for one in slow:
            one.sendall(b" ")
        assert {one.recv(65536).split(b"\r\n")[0].split()[1] for one in slow} == {b"408"}
    finally:
        for one in slow:
            one.close()
    nothing_left(server)


def test_a_long_body_may_take_longer_than_a_short_one(server: Server) -> None:
    """What comes at the pace of a real line is waited for: here twice as long as a short body may take."""

    def pieces() -> Any:
        start, end = json.dumps({**COMPLETION, "user": ""})[:-2], '"}'
        yield start.encode()
        for _ in range(24):
            time.sleep(0.5)
            yield b"x" * 2**18
        yield end.encode()

    with server.http("alice") as http:
        answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == PARIS


def test_what_a_block_saves_cannot_run_code_in_a_kernel(attach: Any, server: Server, tmp_path: Any) -> None:
    engine = attach()
    model, file = engine.model, str(tmp_path / "ran")
    with pytest.raises(LabError, match="x"), engine.trace(TOWER, max_tokens=1):

        class Mine:
            def __reduce__(self) -> Any:
                return (open, (file, "w"))

        x = [model.model.layers[0].output[0][0, 0], Mine()].save()  # noqa: F841
    assert not (tmp_path / "ran").exists()
    # Nor what looks like something of the codec's own.
    with engine.trace(TOWER, max_tokens=1):
        y = {"$type": "CallOver", "__class__": "posix.system", "$": ["tensor", 0]}.save()
        model.model.layers[0].output
    assert y == {"$type": "CallOver", "__class__": "posix.system", "$": ["tensor", 0]}
    assert right(server)
    nothing_left(server)


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_socket_that_would_be_a_websocket_is_refused(server: Server, size: int) -> None:
    status, _ = raw(
        server,
        f"GET /v1/lab/health HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKENS['alice']}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {'A' * size}==\r\n\r\n",
    )
    assert status != 101
    assert right(server)


WAYS = (
    *({"logprobs": 3}, {"prompt_logprobs": 2}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.5}, {"seed": 1}),
    *({"repetition_penalty": 1.2}, {"frequency_penalty": 1}, {"logit_bias": {"5": 1}}, {"bad_words": ["x"]}),
    *({"structured_outputs": {"regex": "a+"}}, {"min_tokens": 3}, {"n": 3}, {"echo": True}),
)


@pytest.mark.parametrize("more", WAYS, ids=lambda more: next(iter(more)))
def test_every_way_of_sampling_runs_in_the_jail(server: Server, more: dict[str, Any]) -> None:
    """Some of them have a function of theirs compiled at its first call, for which there is no compiler."""
    with server.http("alice") as http:
        answer = http.post("/v1/completions", json={**COMPLETION, "temperature": 0.8, **more})
    assert answer.status_code == 200, answer.text
    assert server.figures()["deaths"] == 0

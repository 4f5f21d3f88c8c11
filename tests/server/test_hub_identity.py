"""Users of a JupyterHub: how long its answers hold, a Hub that is silent, and names that never collide."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyterhub.services.auth import HubAuth

from nnsight_lab.errors import ServeRefused
from nnsight_lab.server import hub as hubs
from nnsight_lab.server.hub import GONE_S, HOLDS_S, Hub, hub_service, name_of
from nnsight_lab.server.identity import User
from nnsight_lab.server.limits import Refused

SCOPE = "access:services!service=nnsight-lab"
TOKEN = "0123456789abcdef"


class Scripted(HubAuth):
    """A ``HubAuth`` whose Hub is a dictionary of tokens, or silent."""

    def __init__(self) -> None:
        super().__init__(api_token="")
        self.known = {TOKEN: {"kind": "user", "name": "alice", "groups": [], "scopes": [SCOPE]}}
        self.silent: Exception | None = None
        self.asked = 0

    async def user_for_token(self, token, use_cache=True, session_id="", *, sync=True):
        self.asked += 1
        await asyncio.sleep(0)
        if self.silent is not None:
            raise self.silent
        return self.known.get(token)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(hubs, "time", found)
    return found


@pytest.fixture
def auth():
    return Scripted()


def told(hub, token=TOKEN):
    """The user, None, or the number of the refusal."""
    try:
        return asyncio.run(hub.user(token))
    except Refused as refused:
        return refused.status


def test_an_answer_holds_for_seconds_and_an_ended_token_ends(auth, clock):
    hub = Hub(auth)
    assert [told(hub) for _ in range(3)] == [User("alice")] * 3
    assert auth.asked == 1
    auth.known.clear()
    clock.now += HOLDS_S - 0.1
    assert told(hub) == User("alice")
    clock.now += 0.1
    assert told(hub) is None
    assert told(hub, "") is None
    assert auth.asked == 2


def test_a_hub_that_is_silent_takes_nobody_away_for_minutes_and_lets_nobody_new_in(auth, clock):
    hub = Hub(auth)
    assert told(hub) == User("alice")
    auth.silent = OSError("connection refused")
    clock.now += HOLDS_S
    assert told(hub) == User("alice")
    assert told(hub, "f" * 32) == 503
    asked = auth.asked
    assert [told(hub), told(hub, "e" * 32)] == [User("alice"), 503]
    assert auth.asked == asked  # a silent Hub is not waited for by each request anew
    clock.now += GONE_S
    assert told(hub) == 503
    auth.silent = None
    clock.now += HOLDS_S
    assert told(hub) == User("alice")


def test_a_token_that_ended_does_not_come_back_with_a_silent_hub(auth, clock):
    hub = Hub(auth)
    assert told(hub) == User("alice")
    auth.known.clear()
    clock.now += HOLDS_S
    assert told(hub) is None
    auth.silent = TimeoutError()
    clock.now += HOLDS_S
    assert told(hub) == 503


def test_requests_that_come_together_ask_once_and_one_that_leaves_ends_it_for_nobody(auth):
    hub = Hub(auth)

    async def together():
        asking = [asyncio.ensure_future(hub.user(TOKEN)) for _ in range(5)]
        await asyncio.sleep(0)
        asking[0].cancel()
        return await asyncio.gather(*asking, return_exceptions=True)

    first, *others = asyncio.run(together())
    assert isinstance(first, asyncio.CancelledError)
    assert others == [User("alice")] * 4
    assert auth.asked == 1


def test_whoever_tries_tokens_makes_no_user_forgotten(auth, monkeypatch):
    monkeypatch.setattr(hubs, "_REMEMBERED", 8)
    hub = Hub(auth)
    assert told(hub) == User("alice")
    for number in range(30):
        assert told(hub, f"{number:032}") is None
    assert len(hub._known) <= 8
    asked = auth.asked
    assert told(hub) == User("alice")
    assert auth.asked == asked


@pytest.mark.parametrize(
    ("model", "admin"),
    [
        ({"groups": ["teachers"]}, True),
        ({"groups": ["pupils"]}, False),
        ({"admin": True}, True),
        ({"admin": 1}, False),
    ],
)
def test_admins_are_those_of_the_groups_and_of_the_hub(auth, model, admin):
    auth.known[TOKEN] |= model
    assert told(Hub(auth, admins=frozenset({"teachers"}))) == User("alice", admin)


@pytest.mark.parametrize(
    ("scopes", "answer"),
    [
        (["access:services"], User("alice")),
        (["access:services!service=nnsight-lab"], User("alice")),
        (["access:services!service=nnsight"], 403),
        (["access:servers", "admin:users"], 403),
        ([], 403),
    ],
)
def test_a_token_needs_the_scope_of_this_service(auth, scopes, answer):
    auth.known[TOKEN]["scopes"] = scopes
    assert told(Hub(auth)) == answer


KINDS = st.sampled_from(["user", "service"])
NAMES = st.text(max_size=12) | st.builds(lambda a, b: f"{a}:{b}", KINDS, st.text(max_size=4))


@given(KINDS, NAMES, KINDS, NAMES)
def test_no_two_owners_are_called_alike(kind, name, other_kind, other):
    same = (kind, name) == (other_kind, other)
    assert (name_of(kind, name) == name_of(other_kind, other)) is same


def test_where_the_service_lies_is_read_from_the_environment():
    where = {"JUPYTERHUB_API_URL": "http://127.0.0.1:9/hub/api"}
    assert hub_service(where) == ("nnsight-lab", "/services/nnsight-lab/")
    assert hub_service({**where, "JUPYTERHUB_BASE_URL": "/hub1/", "JUPYTERHUB_SERVICE_NAME": "big"}) == (
        "big",
        "/hub1/services/big/",
    )
    # A Hub that is not up yet is not waited for: the engine may be first.
    assert hub_service({**where, "JUPYTERHUB_API_TOKEN": TOKEN}).name == "nnsight-lab"
    with pytest.raises(ServeRefused, match="needs JUPYTERHUB_API_URL"):
        hub_service({})

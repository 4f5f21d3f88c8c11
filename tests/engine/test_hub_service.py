"""Which engine a kernel finds in its environment, and which server is given its JupyterHub token."""

from __future__ import annotations

import httpx
import pytest

from nnsight_lab.engine import hub_service
from nnsight_lab.engine.proxy_words import said_by_proxy
from nnsight_lab.errors import CellUsageError, ServerError

HUB_TOKEN, OWN = "hub-token-0123456789", "own-token-0123456789"
NAMES = (
    "NNSIGHT_LAB_URL",
    "NNSIGHT_LAB_TOKEN",
    "JUPYTERHUB_API_TOKEN",
    "JUPYTERHUB_PUBLIC_HUB_URL",
    "JUPYTERHUB_HOST",
)


@pytest.fixture
def given(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def give(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return give


def test_an_address_is_the_admins_or_follows_from_the_hubs_own(given):
    with pytest.raises(ServerError, match="this is no server of a JupyterHub"):
        hub_service.address()
    given(JUPYTERHUB_API_TOKEN=HUB_TOKEN)
    with pytest.raises(ServerError, match=r"ask its admin to set NNSIGHT_LAB_URL in c\.Spawner\.environment"):
        hub_service.address()
    given(JUPYTERHUB_PUBLIC_HUB_URL="https://hub.example.org/base/hub/")
    assert hub_service.address() == "https://hub.example.org/base/services/nnsight-lab"
    given(NNSIGHT_LAB_URL="http://proxy-public/services/big/")
    assert hub_service.address() == "http://proxy-public/services/big"


@pytest.mark.parametrize(
    ("url", "goes"),
    [
        ("http://proxy-public/services/nnsight-lab", True),
        ("http://proxy-public/services/other", True),  # the Hub's admin alone says who answers there
        ("https://hub.example.org/services/nnsight-lab", True),
        ("https://hub.example.org/user/mallory/services/nnsight-lab", False),
        ("https://hub.example.org/services/../user/mallory/proxy/80", False),
        ("https://hub.example.org/services/%2e%2e/user/mallory", False),
        ("http://hub.example.org/services/nnsight-lab", False),
        ("https://hub.example.org.mallory.net/services/nnsight-lab", False),
        ("https://hub.example.org:8443/services/nnsight-lab", False),
        ("http://proxy-public:9000/services/nnsight-lab", False),
        ("http://127.0.0.1:8000", False),
        ("unix:/run/lab.sock", False),
    ],
)
def test_the_hubs_token_goes_to_the_hubs_services_alone(given, url, goes):
    given(
        JUPYTERHUB_API_TOKEN=HUB_TOKEN,
        NNSIGHT_LAB_URL="http://proxy-public/services/nnsight-lab",
        JUPYTERHUB_PUBLIC_HUB_URL="https://hub.example.org/hub/",
    )
    assert hub_service.token_for(url) == (HUB_TOKEN if goes else "")
    assert ("token was not sent" in hub_service.without_token(url)) is not (goes or url.startswith("unix"))
    given(NNSIGHT_LAB_TOKEN=OWN)
    assert hub_service.token_for(url) == ("" if url.startswith("unix") else OWN)


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "unix:",
        "",
        "http://host:99999",
        "services/x",
    ],
)
def test_what_is_no_address_is_refused_in_one_line(url):
    with pytest.raises(CellUsageError, match="is no address of a server: http://host:port"):
        hub_service.checked(url)


@pytest.mark.parametrize(
    "url", ["http://me:secret@host:8000", "http://host/?token=secret", "http://host/#secret"]
)
def test_an_address_holds_no_secret(url):
    with pytest.raises(CellUsageError, match=r"set \$NNSIGHT_LAB_TOKEN") as raised:
        hub_service.checked(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (503, "the proxy answers, and no engine behind it"),
        (502, "loading its model"),
        (404, "serves no shared engine"),
        (413, "ask who runs it for a larger one"),
        (302, "leads elsewhere ('/hub/login')"),
        (500, "error of its own: 500"),
    ],
)
def test_a_page_for_browsers_is_never_shown(status, words):
    headers = {"content-type": "text/html", "location": "/hub/login"}
    answer = httpx.Response(status, headers=headers, text="<html>page</html>")
    said = said_by_proxy("http://hub/services/x", answer)
    assert words in said
    assert "<" not in said
    assert "\n" not in said
    assert said_by_proxy("http://hub", httpx.Response(status, json={"error": {"message": "own"}})) == ""

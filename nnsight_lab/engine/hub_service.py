"""Where the shared engine of this JupyterHub is, and which token may go there.

A kernel in a Hub's server has the server's token in its environment, and often nothing that says where the
Hub's proxy is: the Hub's admin says where the engine is. The Hub's token goes to the Hub's own services and
nowhere else: on a machine of many people, whoever listens at a mistyped port would be given it.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from nnsight_lab.errors import CellUsageError, ServerError
from nnsight_lab.wire.serving import HUB_SERVICE

URL_ENV = "NNSIGHT_LAB_URL"
TOKEN_ENV = "NNSIGHT_LAB_TOKEN"
_HUB_TOKEN_ENV = "JUPYTERHUB_API_TOKEN"
_SERVICES = "/services/"


def address() -> str:
    """Of the engine that a kernel attaches to where no address is given.

    Raises:
        ServerError: Nothing says where one is.
    """
    given = os.environ.get(URL_ENV, "")
    if given:
        return given.rstrip("/")
    hub = _public_hub()
    if hub:
        return f"{hub}{_SERVICES}{HUB_SERVICE}"
    if os.environ.get(_HUB_TOKEN_ENV):
        raise ServerError(
            "This JupyterHub does not say where its shared engine is: %engine attach URL, or ask its admin "
            f"to set {URL_ENV} in c.Spawner.environment."
        )
    raise ServerError(
        f"No address is given, ${URL_ENV} is not set, and this is no server of a JupyterHub: "
        "%engine attach URL."
    )


def checked(url: str) -> str:
    """An address that can be shown: it holds no password and no token.

    Raises:
        CellUsageError: It is none.
    """
    try:
        split = urlsplit(url)
        fits = split.scheme in ("http", "https") and split.hostname and split.port != 0
        fits = fits or (split.scheme == "unix" and bool(split.path))
    except ValueError:  # a port that is no number
        fits = False
    if not fits:
        raise CellUsageError(
            f"{url.partition('@')[2] or url!r} is no address of a server: http://host:port, the address of a "
            "JupyterHub's service, or unix:/path/of/socket."
        )
    if split.query or split.fragment or "@" in split.netloc:
        raise CellUsageError(
            f"An address is shown and saved, so it holds no token and no password: set ${TOKEN_ENV} instead."
        )
    return url.rstrip("/")


def token_for(url: str) -> str:
    """The token of this kernel's environment that may go to a server; "" for none."""
    if url.startswith("unix:"):
        return ""
    own = os.environ.get(TOKEN_ENV, "")
    return own or (os.environ.get(_HUB_TOKEN_ENV, "") if _of_hub(url) else "")


def without_token(url: str) -> str:
    """What to do where a server asks for a token and none was sent."""
    if url.startswith("unix:") or token_for(url):
        return ""
    if os.environ.get(_HUB_TOKEN_ENV):
        return (
            f" This JupyterHub's token was not sent: {url} is not known to be its service. Ask its admin to "
            f"set {URL_ENV} in c.Spawner.environment, or set ${TOKEN_ENV}."
        )
    return f" Set ${TOKEN_ENV} to yours."


def _of_hub(url: str) -> bool:
    """Whether a server is a service of this kernel's Hub, as far as the environment tells."""
    given = os.environ.get(URL_ENV, "").rstrip("/")
    if given == url.rstrip("/"):
        return True
    hub = _public_hub()
    ways = [hub + _SERVICES] if hub else []
    if _SERVICES in given:
        ways.append(given[: given.index(_SERVICES) + len(_SERVICES)])
    # Below /services/ only the Hub's admin decides who answers; dots would lead out of it.
    return any(url.startswith(way) for way in ways) and ".." not in url and "%" not in url


def _public_hub() -> str:
    """Where the Hub's proxy is reached, where the Hub says so; not one with a domain for each service."""
    hub = os.environ.get("JUPYTERHUB_PUBLIC_HUB_URL", "").rstrip("/")
    return hub.removesuffix("/hub") if hub and not os.environ.get("JUPYTERHUB_HOST") else ""

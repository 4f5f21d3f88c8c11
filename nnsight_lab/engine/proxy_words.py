"""What stands between a kernel and a shared engine says, in words about the engine.

A JupyterHub's proxy, or any other, answers with a page for a browser where the engine does not answer. Such a
page is never shown in a notebook.
"""

from __future__ import annotations

import httpx

_ABSENT = (502, 503, 504)


def said_by_proxy(url: str, answer: httpx.Response) -> str:
    """What an answer means that is not the engine's own; "" for one that is.

    Args:
        url: Of the engine.
        answer: One that is no success.
    """
    if answer.headers.get("content-type", "").startswith("application/json"):
        return ""
    status = answer.status_code
    if answer.is_redirect:
        return (
            f"{url} leads elsewhere ({answer.headers.get('location', '')!r:.120}) instead of answering: "
            "there is no shared engine at this address, or it wants https."
        )
    if status in _ABSENT:
        return (
            f"{url}: the proxy answers, and no engine behind it ({status}). It may be loading its model, "
            "which takes minutes; else ask who runs it."
        )
    if status == 404:
        return f"{url} serves no shared engine: is the address right, with the service's name?"
    if status == 413:
        return f"A proxy before {url} refuses a request of this size: ask who runs it for a larger one."
    return f"{url} answers with an error of its own: {status} {answer.reason_phrase}."

"""Reads what is left of a refused request's body, so that its client hears why.

A client that still sends while its connection is closed reads no answer; and JupyterHub's proxy passes one on
only when the whole body is through, or six seconds later. What is read goes nowhere, and is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

_MOST_BYTES = 2**30
_MOST_S = 30.0


async def read_off(
    headers: Iterable[tuple[bytes, bytes]], receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
) -> None:
    """Read the rest of a body, as far as that is reasonable.

    Args:
        headers: The request's.
        receive: Its messages, without a limit.
    """
    names = {name.lower() for name, _ in headers}
    # Whoever waits to be told to send has sent nothing, and would be told by our reading.
    if b"expect" in names or not names & {b"content-length", b"transfer-encoding"}:
        return
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_read(receive), _MOST_S)


async def _read(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    read = 0
    while read < _MOST_BYTES:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        read += len(message.get("body") or b"")

"""A request's body, up to a number of bytes and of seconds, whatever its header says.

Nothing in Starlette or uvicorn ends a client that sends a byte a minute: each holds a connection and a task
for as long as it likes. A long body may take longer, at a pace that any real line has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nnsight_lab.server.limits import Refused, too_large
from nnsight_lab.server.reading import read_off

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

#: Of the slowest line that is waited for, once a body's first seconds are over.
_BYTES_PER_S = 256 * 1024


def limited(headers: list[tuple[bytes, bytes]], receive: Receive, most: int, limit_s: float) -> Receive:
    """Receives a request's body of at most ``most`` bytes, in ``limit_s`` seconds, a long one in more.

    Raises:
        Refused: Here where the header says too much already, and in what is returned where more comes, or
            comes too slowly.
    """
    said = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    if said.isdigit() and int(said) > most:
        raise too_large(int(said), most, "The request")
    seen = 0
    whole = False
    began = time.monotonic()

    async def receive_some() -> MutableMapping[str, Any]:
        nonlocal seen, whole
        if whole:  # what is waited for now is that the client leaves
            return await receive()
        left = began + limit_s + seen / _BYTES_PER_S - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, left))
        except TimeoutError:
            raise Refused(
                408, f"The request's body came too slowly to wait longer than {limit_s:g} s."
            ) from None
        seen += len(message.get("body") or b"")
        whole = not message.get("more_body")
        if seen > most:
            if not whole:
                await read_off(headers, receive)
            raise too_large(seen, most, "The request")
        return message

    return receive_some

"""An answer of known length, sent from memory that others own: no part of it is joined or copied first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.responses import Response


class Streamed(Response):
    """Bytes, chunk by chunk, each once the one before it was taken.

    Its length is said before, so that a reader has memory ready and can tell an answer that was cut off.

    Args:
        chunks: The bytes.
        nbytes: How many they are.
        media_type: What they are.
    """

    def __init__(self, chunks: Iterable[memoryview | bytes], nbytes: int, media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"content-length": str(nbytes)})
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

"""HTTP whose answers are bounded: a server cannot fill a kernel's memory by never ending, nor by compressing.

An answer that is read whole has at most `ANSWER_MOST` bytes; that of a call goes on for as long as the call
does and is bounded frame by frame (`frames`). What a server says of compression is not believed: nobody asked
for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from nnsight_lab.errors import ServerError
from nnsight_lab.wire.serving import PREFIX
from nnsight_lab.wire.sizes import shown_bytes

ANSWER_MOST = 256 * 2**20
_ENDLESS = f"{PREFIX}/calls"


class Bounded(httpx.HTTPTransport):
    """A transport whose answers end."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        request.headers["Accept-Encoding"] = "identity"
        answer = super().handle_request(request)
        answer.headers.pop("Content-Encoding", None)
        if request.url.path.endswith(_ENDLESS) and answer.is_success:
            return answer
        assert isinstance(answer.stream, httpx.SyncByteStream)
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            stream=_Counted(answer.stream, str(request.url.copy_with(query=None))),
            extensions=answer.extensions,
        )


class _Counted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, url: str) -> None:
        self._stream = stream
        self._url = url

    def __iter__(self) -> Iterator[bytes]:
        seen = 0
        for chunk in self._stream:
            seen += len(chunk)
            if seen > ANSWER_MOST:
                raise ServerError(f"{self._url} answers more than {shown_bytes(ANSWER_MOST)}, and was left.")
            yield chunk

    def close(self) -> None:
        self._stream.close()

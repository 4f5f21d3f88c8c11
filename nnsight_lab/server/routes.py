"""The routes of a shared engine beside OpenAI's: a kernel's calls and edits, and saves by response id."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nnsight_lab.server.audit import audit
from nnsight_lab.server.desk import Desk, OpenCall, asking, pieces_of
from nnsight_lab.server.kept_saves import KeptSaves
from nnsight_lab.server.ledger import ServedEdit
from nnsight_lab.server.limits import Refused, not_found
from nnsight_lab.server.streamed import Streamed
from nnsight_lab.wire.codec import WireError, decode, encode
from nnsight_lab.wire.messages import RequestSaves
from nnsight_lab.wire.serving import (
    ASKED_HEADER_BYTES,
    CONTENT_TYPE,
    PREFIX,
    TAKES,
    TAKES_STEPS,
    CallAsked,
    EditAsked,
)

router = APIRouter(prefix=PREFIX)

#: A chunk of an answer: large enough to cost little each, small enough to wait for a slow reader.
_CHUNK_BYTES = 4 * 2**20


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.nnsight_lab_desk
    return desk


async def _message(request: Request, kind: type[Any]) -> Any:
    try:
        found = decode(await request.body(), max_header_bytes=ASKED_HEADER_BYTES)
    except WireError as error:
        raise Refused(400, f"The request cannot be read: {error}.") from None
    if type(found) is not kind:
        raise Refused(400, f"The request holds a {type(found).__name__}, not a {kind.__name__}.")
    return found


@router.get("/served")
async def served(request: Request) -> Response:
    """The engine and its model, for a kernel that attaches."""
    user = asking()
    described = await request.app.state.nnsight_lab_describe(user)
    return Response(encode(described), media_type=CONTENT_TYPE)


@router.get("/health")
async def health(request: Request) -> Response:
    """Who the asker is, and how far users are kept apart."""
    user = asking()
    return JSONResponse({"user": user.name, "admin": user.admin, **request.app.state.nnsight_lab_health()})


@router.put("/leases/{lease}")
async def renew(lease: str, request: Request) -> Response:
    """Begin a lease (201), or say that its kernel is still there (204)."""
    new = _desk(request).open_lease(asking(), lease)
    return Response(status_code=201 if new else 204)


@router.delete("/leases/{lease}")
async def end(lease: str, request: Request) -> Response:
    """End a lease: its edits are cleared, its calls aborted."""
    await _desk(request).end_lease(asking().name, lease)
    return Response(status_code=204)


@router.post("/edits")
async def install(request: Request) -> Response:
    """Install an edit."""
    await _desk(request).install(asking(), await _message(request, EditAsked))
    return Response(status_code=204)


@router.get("/edits")
async def edits(request: Request) -> Response:
    """The asker's edits and the published ones."""
    user = asking()
    mine = _desk(request).ledger.edits(user)
    return JSONResponse([_told(edit, user.name) for edit in mine])


@router.patch("/edits/{edit_id}")
async def change(edit_id: str, request: Request) -> Response:
    """Switch an edit on or off for the owner's OpenAI requests, or publish it."""
    user, ledger = asking(), _desk(request).ledger
    try:
        asked = await request.json()
    except ValueError:
        asked = None
    if type(asked) is not dict or not asked or any(type(value) is not bool for value in asked.values()):
        raise Refused(400, 'An edit is changed by {"on": true} or {"published": true}.')
    edit = ledger.edit(user, edit_id)
    for name, value in asked.items():
        if name == "on":
            edit.on = value
        elif name == "published":
            ledger.publish(user, edit_id, value)
        else:
            raise Refused(400, f"An edit has no {name!r} to change; it has on and published.")
    audit.note("edit change", user.name, edit_id, on=edit.on, published=edit.published)
    return JSONResponse(_told(edit, user.name))


@router.delete("/edits/{edit_id}")
async def clear(edit_id: str, request: Request) -> Response:
    """Clear an edit; an unknown one is harmless."""
    await _desk(request).clear(asking(), [edit_id])
    return Response(status_code=204)


@router.post("/calls")
async def call(request: Request) -> Response:
    """Run requests: outputs as they grow, saves when they are there."""
    asked: CallAsked = await _message(request, CallAsked)
    takes = request.headers.get(TAKES, "")
    return CallAnswer(_desk(request).call(asking(), asked, steps=TAKES_STEPS in takes.split(",")))


@router.post("/look")
async def look(request: Request) -> Response:
    """A piece of a logit lens or of attention patterns."""
    asking()
    return Response(await _desk(request).look(await request.body()), media_type=CONTENT_TYPE)


@router.get("/steps")
async def steps(request: Request) -> Response:
    """How the engine's steps ran, over all its users, without the names of anybody's edits."""
    asking()
    return Response(encode(await _desk(request).steps()), media_type=CONTENT_TYPE)


@router.post("/leases/{lease}/peek")
async def peek(lease: str, request: Request) -> Response:
    """What a running request has saved so far."""
    found = await _desk(request).peek(asking(), lease, await request.body())
    return Response(found, media_type=CONTENT_TYPE)


@router.post("/leases/{lease}/door")
async def ticket(lease: str, request: Request) -> Response:
    """What a kernel on this machine says at the door."""
    desk, user = _desk(request), asking()
    desk.ledger.lease(user, lease)
    return JSONResponse({"ticket": desk.door.ticket(user.name, lease)})


@router.post("/leases/{lease}/pieces")
async def give_back(lease: str, request: Request) -> Response:
    """Pieces of memory that a kernel looks at no more; the answer names what it need not map either."""
    pieces = pieces_of(await request.body())
    return Response(encode(_desk(request).door.give_back(asking().name, lease, pieces)))


@router.get("/leases/{lease}/parked/{name}")
async def piece(lease: str, name: str, start: int, stop: int, request: Request) -> Response:
    """Bytes of a reply that was too large for a frame."""
    found = _desk(request).parking.piece(asking().name, lease, name, start, stop)
    return Streamed(found, stop - start, CONTENT_TYPE)


@router.delete("/leases/{lease}/parked/{name}")
async def unpark(lease: str, name: str, request: Request) -> Response:
    """The reply was fetched, or is not wanted; an unknown one is harmless."""
    _desk(request).parking.drop(asking().name, lease, name)
    return Response(status_code=204)


@router.delete("/leases/{lease}/calls/{call_id}")
async def abort(lease: str, call_id: str, request: Request) -> Response:
    """Abort a call; an unknown one is harmless."""
    _desk(request).abort(asking(), lease, call_id)
    return Response(status_code=204)


@router.get("/saves/{request_id}")
async def saves(
    request_id: str, request: Request, name: str | None = None, rows: str | None = None
) -> Response:
    """What an OpenAI request's edits saved, by the response's id.

    Args:
        request_id: The ``id`` of the completion.
        request: The HTTP request.
        name: One value, as ``probe/hidden``; all of them where it is None.
        rows: Of its first dimension, as ``0:4``.
    """
    user = asking()
    ledger = _desk(request).ledger
    found: RequestSaves | None = None
    # A completion's engine id ends in the prompt's number.
    for one in (request_id, f"{request_id}-0"):
        try:
            found = ledger.kept(user, one)
        except Refused:
            continue
        break
    if found is None:
        raise not_found("request with saves")
    file = KeptSaves(found).file(name, rows)
    return Streamed(file.chunks, file.nbytes, "application/vnd.safetensors")


@router.delete("/saves/{request_id}")
async def drop(request_id: str, request: Request) -> Response:
    """Forget what a request saved; an unknown one is harmless."""
    for one in (request_id, f"{request_id}-0"):
        _desk(request).ledger.drop_kept(asking(), one)
    return Response(status_code=204)


class CallAnswer(Response):
    """A call's frames, for as long as somebody reads them.

    Starlette's own streaming answer notices a reader that is gone when it next writes; a call may run for
    minutes before it writes anything.
    """

    media_type = CONTENT_TYPE

    def __init__(self, call: OpenCall) -> None:
        super().__init__()
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            await asyncio.shield(asyncio.ensure_future(self._call.over()))
        if writing.done() and not writing.cancelled() and writing.exception() is not None:
            raise writing.exception()  # type: ignore[misc]

    async def _write(self, send: Any) -> None:
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for parts in self._call.messages:
            for chunk in _framed(parts):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Any) -> None:
    """Return once the reader is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(edit: ServedEdit, asker: str) -> dict[str, Any]:
    return {
        "id": edit.id,
        "name": edit.name,
        "owner": edit.owner,
        "mine": edit.owner == asker,
        "on": edit.on,
        "published": edit.published,
        "steps": edit.steps,
    }


def _framed(parts: list[Any]) -> Iterator[bytes]:
    """A frame in chunks; a tensor's memory goes into them without a copy of the whole."""
    views = [memoryview(part).cast("B") for part in parts]
    small = bytearray((sum(view.nbytes for view in views)).to_bytes(8, "little"))
    for view in views:
        if view.nbytes < _CHUNK_BYTES and len(small) + view.nbytes < _CHUNK_BYTES:
            small += view
            continue
        if small:
            yield bytes(small)
            small = bytearray()
        for at in range(0, view.nbytes, _CHUNK_BYTES):
            yield bytes(view[at : at + _CHUNK_BYTES])
    if small:
        yield bytes(small)

"""The routes of a shared engine beside OpenAI's: a kernel's calls and edits, and saves by response id."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from safetensors.torch import save as safetensors_bytes

from nnsight_lab.server.desk import Desk, OpenCall, asking
from nnsight_lab.server.ledger import ServedEdit
from nnsight_lab.server.limits import Refused, not_found
from nnsight_lab.wire.codec import WireError, decode, encode
from nnsight_lab.wire.messages import BlockSaves, RequestSaves
from nnsight_lab.wire.serving import CONTENT_TYPE, PREFIX, CallAsked, EditAsked

router = APIRouter(prefix=PREFIX)

#: A chunk of an answer: large enough to cost little each, small enough to wait for a slow reader.
_CHUNK_BYTES = 4 * 2**20


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.nnsight_lab_desk
    return desk


async def _message(request: Request, kind: type[Any]) -> Any:
    try:
        found = decode(await request.body())
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
    new = _desk(request).ledger.open_lease(asking(), lease)
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
    return CallAnswer(_desk(request).call(asking(), asked))


@router.post("/look")
async def look(request: Request) -> Response:
    """A piece of a logit lens or of attention patterns."""
    asking()
    return Response(await _desk(request).look(await request.body()), media_type=CONTENT_TYPE)


@router.post("/leases/{lease}/peek")
async def peek(lease: str, request: Request) -> Response:
    """What a running request has saved so far."""
    found = await _desk(request).peek(asking(), lease, await request.body())
    return Response(found, media_type=CONTENT_TYPE)


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
    tensors, metadata = _flat(found)
    if name is not None:
        if name not in tensors and name not in metadata:
            raise not_found(f"save {name!r}")
        tensors = {name: tensors[name]} if name in tensors else {}
        metadata = {name: metadata[name]} if name in metadata else {}
    if rows is not None:
        tensors = {key: _rows(value, rows) for key, value in tensors.items()}
    # Copies: of several saves in one slab, or of one value under two names, safetensors refuses the others.
    whole = {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    body = safetensors_bytes(whole, metadata)
    return Response(body, media_type="application/vnd.safetensors")


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


def _flat(saves: RequestSaves) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by ``block/name`` (a list's by ``block/name/1``), the rest as text."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for sequence in saves.sequences:
        for block in sequence.blocks:
            start = f"{block.block}" if sequence.index == 0 else f"{block.block}#{sequence.index}"
            _flat_block(start, block, tensors, metadata)
    if saves.error is not None:
        metadata["error"] = f"{saves.error.type_name}: {saves.error.message}"
    return tensors, metadata


def _flat_block(
    start: str, block: BlockSaves, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    if block.error is not None:
        metadata[f"{start}/error"] = f"{block.error.type_name}: {block.error.message}"
    todo: list[tuple[str, Any]] = [(f"{start}/{name}", value) for name, value in block.values.items()]
    while todo:
        key, value = todo.pop(0)
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            todo = [(f"{key}/{place}", item) for place, item in enumerate(value)] + todo
        elif isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values()):
            todo = [(f"{key}/{name}", item) for name, item in value.items()] + todo
        else:
            metadata[key] = repr(value)


def _rows(value: torch.Tensor, rows: str) -> torch.Tensor:
    start, colon, stop = rows.partition(":")
    try:
        if not colon:
            raise ValueError
        return value[slice(int(start) if start else None, int(stop) if stop else None)]
    except (ValueError, IndexError):
        raise Refused(400, f"rows={rows!r} is not a range of rows, such as 0:4.") from None

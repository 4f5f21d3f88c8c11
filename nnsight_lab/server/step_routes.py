"""Edits as data for whoever has only an HTTP client: ``PUT /v1/lab/steps/NAME``.

The body is JSON, ``{"steps": [{"op": "add", "site": "model.layers.5", "tensor": [0.1, …], "scale": 3}]}``; or
a safetensors file that has the same list as text under ``steps`` in its metadata, whose tensors the steps
name. It is an edit like any other, on for its owner's requests, until it is deleted or ``hold_s`` have
passed: no kernel says that its owner is still there.
"""

from __future__ import annotations

import json
import math
import uuid
from typing import Any, Final

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load

from nnsight_lab.errors import EditRefused
from nnsight_lab.server.desk import Desk, asking
from nnsight_lab.server.identity import User
from nnsight_lab.server.limits import Refused, not_found, too_large
from nnsight_lab.server.trust import Trust, payload_of
from nnsight_lab.steps.form import of_json, to_json
from nnsight_lab.wire.serving import PREFIX, EditAsked

router = APIRouter(prefix=PREFIX)

SAFETENSORS: Final = "application/vnd.safetensors"
_LENGTH_BYTES: Final = 8
HOLD_S: Final = 3600.0
_LONGEST_S: Final = 7 * 24 * 3600.0


@router.put("/steps/{name}")
async def put(name: str, request: Request, hold_s: float = HOLD_S) -> Response:
    """Install steps under a name, in the place of those that had it."""
    user, desk, trust = asking(), _desk(request), _trust(request)
    if not (math.isfinite(hold_s) and 0 < hold_s <= _LONGEST_S):
        raise Refused(400, f"hold_s={hold_s:g} is not between 0 and {_LONGEST_S:g} seconds.")
    body = await request.body()
    if len(body) > desk.ledger.limits.block_bytes:
        raise too_large(len(body), desk.ledger.limits.block_bytes, "An edit")
    try:
        told, tensors = _read(body, request.headers.get("content-type", ""))
        steps = of_json(told, tensors)
    except EditRefused as refused:
        raise Refused(400, str(refused)) from None
    fit = await trust.fitted({"steps": steps})
    lease = f"steps-{uuid.uuid4().hex[:12]}"
    desk.ledger.open_lease(user, lease, hold_s)
    try:
        edit_id = f"steps-{uuid.uuid4().hex[:12]}"
        await desk.install(user, EditAsked(edit_id, name, payload_of(fit), lease, declared=True))
    except BaseException:
        await desk.end_lease(user.name, lease)
        raise
    await _drop(desk, user, name, but=edit_id)
    return JSONResponse({"id": edit_id, "name": name, "hold_s": hold_s, "steps": to_json(fit)}, 201)


@router.delete("/steps/{name}")
async def delete(name: str, request: Request) -> Response:
    """Clear the steps of that name."""
    if not await _drop(_desk(request), asking(), name):
        raise not_found("edit of steps")
    return Response(status_code=204)


async def _drop(desk: Desk, user: User, name: str, but: str = "") -> bool:
    """Clear what this route installed under a name; whether there was anything."""
    mine = [e for e in desk.ledger.edits(user) if e.owner == user.name and e.name == name and e.id != but]
    found = [edit for edit in mine if edit.id.startswith("steps-")]
    for edit in found:
        await desk.clear(user, [edit.id])
        await desk.end_lease(user.name, edit.lease)
    return bool(found)


def _read(body: bytes, kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The steps as they were told, and the tensors beside them.

    Raises:
        EditRefused: The body is neither form.
    """
    if kind.partition(";")[0].strip().lower() == SAFETENSORS:
        try:
            length = int.from_bytes(body[:_LENGTH_BYTES], "little")
            tensors = safetensors_load(body)
            header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + length])
            told = json.loads((header.get("__metadata__") or {})["steps"])
        except KeyError:
            raise EditRefused("The safetensors file has no steps in its metadata.") from None
        except (SafetensorError, ValueError, TypeError, RecursionError) as error:
            raise EditRefused(f"The safetensors file cannot be read: {_line(error)}.") from None
        return told, dict(tensors)
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise EditRefused(
            f'The body is neither JSON, {{"steps": […]}}, nor, as {SAFETENSORS}, a file with steps in its '
            "metadata."
        ) from None
    if type(told) is not dict or set(told) != {"steps"}:
        raise EditRefused('The body should be {"steps": […]} and nothing else.')
    return told["steps"], {}


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.nnsight_lab_desk
    return desk


def _trust(request: Request) -> Trust:
    trust: Trust = request.app.state.nnsight_lab_trust
    return trust

"""What admins see and end: everybody's leases, edits and requests.

The names of things and whose they are, never what a block or a prompt holds. For anybody else these routes
are not there.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nnsight_lab.server.desk import Desk, asking
from nnsight_lab.server.identity import User
from nnsight_lab.server.limits import Refused
from nnsight_lab.server.notes import note
from nnsight_lab.wire.serving import PREFIX

router = APIRouter(prefix=f"{PREFIX}/admin")


def _admin(request: Request) -> tuple[User, Desk]:
    user = asking()
    if not user.admin:
        raise Refused(404, "Not served here.")
    desk: Desk = request.app.state.nnsight_lab_desk
    return user, desk


@router.get("/leases")
async def leases(request: Request) -> Response:
    """Every kernel that is attached."""
    _, desk = _admin(request)
    now, edits = time.monotonic(), desk.ledger.installed()
    return JSONResponse(
        [
            {
                "owner": lease.owner,
                "id": lease.id,
                "expires_s": round(lease.expires - now, 1),
                "calls": len(lease.calls),
                "edits": sum(e.owner == lease.owner and e.lease == lease.id for e in edits),
            }
            for lease in desk.ledger.leases()
        ]
    )


@router.get("/edits")
async def edits(request: Request) -> Response:
    """Every installed edit."""
    _, desk = _admin(request)
    return JSONResponse(
        [
            {
                "owner": edit.owner,
                "id": edit.id,
                "name": edit.name,
                "lease": edit.lease,
                "on": edit.on,
                "published": edit.published,
                "in_flight": edit.in_flight,
                "bytes": len(edit.payload),
            }
            for edit in desk.ledger.installed()
            if not edit.scoped
        ]
    )


@router.get("/requests")
async def requests(request: Request) -> Response:
    """Every request that runs, and how many of each user wait."""
    _, desk = _admin(request)
    now = time.monotonic()
    running: list[dict[str, Any]] = [
        {
            "owner": turn.user,
            "id": turn.request_id,
            "state": "running",
            "for_s": round(now - turn.began, 1),
            "prompt_tokens": turn.prompt_tokens,
            "generated_tokens": turn.generated_tokens,
            "blocks": turn.blocks,
        }
        for turn in desk.turns.running.values()
    ]
    waiting = [
        {
            "owner": turn.user,
            "id": turn.request_id,
            "state": "waiting",
            "for_s": round(now - turn.began, 1),
            "prompt_tokens": 0,
            "generated_tokens": 0,
            "blocks": turn.blocks,
        }
        for turn in desk.turns.waiters()
    ]
    return JSONResponse(running + waiting)


@router.delete("/leases/{owner}/{lease}")
async def end_lease(owner: str, lease: str, request: Request) -> Response:
    """End a lease: its calls are aborted, its edits cleared."""
    user, desk = _admin(request)
    if not any(one.owner == owner and one.id == lease for one in desk.ledger.leases()):
        raise Refused(404, f"{owner} has no lease {lease!r}.")
    await desk.end_lease(owner, lease)
    note("lease ended", by=user.name, owner=owner, lease=lease)
    return Response(status_code=204)


@router.delete("/edits/{owner}/{edit_id}")
async def clear_edit(owner: str, edit_id: str, request: Request) -> Response:
    """Clear an edit, published or not."""
    user, desk = _admin(request)
    theirs = User(owner)
    desk.ledger.edit(theirs, edit_id)
    await desk.clear(theirs, [edit_id])
    note("edit cleared", by=user.name, owner=owner, edit=edit_id)
    return Response(status_code=204)


@router.patch("/edits/{owner}/{edit_id}")
async def publish_edit(owner: str, edit_id: str, request: Request) -> Response:
    """Publish an edit of any owner, or take that back."""
    user, desk = _admin(request)
    try:
        asked = await request.json()
    except ValueError:
        asked = None
    if type(asked) is not dict or set(asked) != {"published"} or type(asked["published"]) is not bool:
        raise Refused(400, 'An edit is published by {"published": true}.')
    desk.ledger.publish(User(owner, admin=True), edit_id, asked["published"])
    note(
        "edit published" if asked["published"] else "edit unpublished",
        by=user.name,
        owner=owner,
        edit=edit_id,
    )
    return Response(status_code=204)


@router.delete("/requests/{request_id}")
async def end_request(request_id: str, request: Request) -> Response:
    """Abort a request that runs."""
    user, desk = _admin(request)
    turn = desk.turns.running.get(request_id)
    if turn is None:
        raise Refused(404, f"No request {request_id!r} is running.")
    desk.driver.abort_ids([request_id])
    note("request aborted", by=user.name, owner=turn.user, request=request_id)
    return Response(status_code=204)

"""What the workers hold, told to admins: nothing, where no request is under way and no saves are kept."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nnsight_lab.server.desk import Desk, asking
from nnsight_lab.server.limits import Refused
from nnsight_lab.wire.keys import COUNT, SLABS, TRIM
from nnsight_lab.wire.serving import PREFIX

router = APIRouter(prefix=PREFIX)


@router.get("/workers")
async def workers(request: Request, trim: bool = False) -> Response:
    """Requests that a worker tracks, and the shared memory of saves, of the rank that has most.

    Args:
        request: The HTTP request.
        trim: Whether memory that is free in a worker's heap goes back to the system first.
    """
    if not asking().admin:
        raise Refused(403, "What the workers hold is told to admins.")
    desk: Desk = request.app.state.nnsight_lab_desk
    if trim:
        await desk.rpc(TRIM)
    slabs: list[dict[str, Any]] = await desk.rpc(SLABS)
    return JSONResponse(
        {
            "tracked": max(await desk.rpc(COUNT)),
            "used_bytes": max(rank["used_bytes"] for rank in slabs),
            "total_bytes": max(rank["total_bytes"] for rank in slabs),
        }
    )

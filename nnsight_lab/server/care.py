"""What goes on in a server beside its requests: begun once the engine is there, ended with the process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

from nnsight_lab.server import metrics
from nnsight_lab.server.command import Settings
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.ending import Ending
from nnsight_lab.server.keeper import Keeper
from nnsight_lab.server.sleeper import Sleeper


def look_after(
    llm: Any, state: Any, arguments: Any, desk: Desk, settings: Settings
) -> list[asyncio.Task[None]]:
    """Keep the engine alive, end the server in order, and tell its figures.

    Returns:
        The tasks, to be held.
    """
    ending = Ending(state, desk, settings.drain_s)
    sleeper = None if settings.sleep_after_s is None else Sleeper(llm, settings.sleep_after_s)
    if sleeper is not None:
        desk.driver.awake = sleeper.awake
    keeper = Keeper(
        llm,
        arguments,
        desk,
        step_limit_s=settings.step_limit_s,
        restarts=settings.restarts,
        sleeper=sleeper,
        give_up=lambda: ending.end(0.0),
    )
    metrics.tell(desk)
    CONDITION.start_s = time.time() - psutil.Process().create_time()
    CONDITION.ready()
    return [asyncio.create_task(keeper.run()), asyncio.create_task(ending.listen())]

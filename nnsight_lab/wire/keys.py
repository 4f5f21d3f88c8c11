"""Names both ends of the engine's border use: one place per constant on the wire."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: In ``SamplingParams.extra_args``: the pickled block of a trace (bytes).
TRACE_KEY = "lab_trace"
#: Beside it, or alone where the workers have the block: what a trace's block is called by (str).
CONTENT_KEY = "lab_content"
#: In ``SamplingParams.extra_args``: a block of this package's own, as the codec's bytes.
DECLARED_KEY = "lab_declared"
#: In ``SamplingParams.extra_args``: the edits a request runs, as ``[registration id, ...]`` in order.
EDITS_KEY = "lab_edits"
#: Each way a block comes aboard a request.
BLOCK_KEYS = (TRACE_KEY, CONTENT_KEY, DECLARED_KEY, EDITS_KEY)


def has_blocks(extra: Mapping[str, Any]) -> bool:
    """Whether blocks ride a request with these ``extra_args``: an empty list of edits is none."""
    return any(extra.get(key) not in (None, [], ()) for key in BLOCK_KEYS)


#: The block name under which a trace's own saves come home; an edit cannot be called that.
TRACE_BLOCK = "trace"

#: In ``SamplingParams.extra_args``: how many bytes the request's blocks may save (int).
BUDGET_KEY = "lab_budget"

#: In ``SamplingParams.extra_args``: whose shared memory the request's saves go to (str); nobody else's do.
SHARE_KEY = "lab_share"

#: In ``SamplingParams.extra_args``: what of a prompt the request's blocks touch, a word of
#: `nnsight_lab.wire.touch.Reach`; a request with blocks and without it is taken to read all of it.
REACH_KEY = "lab_reach"

#: In vLLM's ``additional_config``: how prompts are cut (see `nnsight_lab.worker.scheduler`).
SCHEDULE_CONFIG = "nnsight_lab_schedule"
#: vLLM's ``scheduler_cls`` of our engines.
SCHEDULER = "nnsight_lab.worker.scheduler.scheduler"

#: In vLLM's ``additional_config``: how a worker's saves travel (see `nnsight_lab.worker.courier`).
SAVES_CONFIG = "nnsight_lab_saves"

#: Worker methods reached by ``collective_rpc``.
COLLECT = "lab_collect"
REGISTER = "lab_register"
#: The same of an edit that is data.
DECLARE = "lab_declare"
CLEAR = "lab_clear"
#: How far blocks are trusted from now on.
TRUST = "lab_trust"
RELEASE = "lab_release"
RETIRE = "lab_retire"
FREE = "lab_free"
LOOK = "lab_look"
PEEK = "lab_peek"
STEPS = "lab_steps"
SLABS = "lab_slabs"
DESCRIBE = "lab_describe"
COUNT = "nnsight_request_count"
#: Memory that is free in a worker's heap goes back to the system.
TRIM = "lab_trim"

#: Set for the processes of an engine while it starts: which engine, whose, and where to log.
ENGINE_ENV = "NNSIGHT_LAB_ENGINE"
OWNER_ENV = "NNSIGHT_LAB_OWNER"
LOG_ENV = "NNSIGHT_LAB_LOG"
#: Of which model it is, as it was asked for: said to people.
MODEL_ENV = "NNSIGHT_LAB_MODEL"
#: Set for the server of a kept engine: its record (see `nnsight_lab.engine.kept`).
KEPT_ENV = "NNSIGHT_LAB_KEPT"

#: Where a server names them, whose processes have no log of their own.
STOP_ENV = "NNSIGHT_LAB_STOP"
#: Named there instead of a request: whichever block runs at this moment.
WHICHEVER = "*"

#: Asks a worker to break off the block that runs, where its request is named in `stop_file`. Its default
#: action ends a process, so it is sent to those only that take it.
STOP_SIGNAL = signal.SIGUSR2


def stop_file(log: Path) -> Path:
    """Where the requests that were given up are named, beside the engine's log."""
    return log.with_suffix(".stop")

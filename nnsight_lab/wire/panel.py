"""The words between a kernel and JupyterLab's panel, and the records it is told.

`labextension/src/lab/wire.ts` mirrors this file, and a test compares the two, names and types. Everything is
plain JSON and small: no tensor, and no text of a prompt beyond its beginning. The two sides may be of
different versions, in environments of their own, so each says its `PROTOCOL`, and a side that does not know
the other's says so in words instead of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: One more whenever a field or a word changes its meaning or goes.
PROTOCOL: Final = 1

#: Messages on the control channel, which is answered while a cell runs.
STATUS_REQUEST: Final = "nnsight_lab_status_request"
STATUS_REPLY: Final = "nnsight_lab_status_reply"
ACTION_REQUEST: Final = "nnsight_lab_action_request"
ACTION_REPLY: Final = "nnsight_lab_action_reply"
#: The comm that a page opens to be told of changes; each message is a status.
COMM_TARGET: Final = "nnsight_lab_panel"
#: What the page says on it: whether it is looked at, and how often to tell it though nothing changed.
VISIBLE: Final = "visible"
EVERY_S: Final = "every_s"
#: There, and in a status request: whether the newest requests' saves are wanted too.
SAVES: Final = "saves"

#: States of an engine.
STARTING: Final = "starting"
READY: Final = "ready"
BUSY: Final = "busy"
ASLEEP: Final = "asleep"
DEAD: Final = "dead"
STOPPED: Final = "stopped"

#: What an action request asks for.
ACTION: Final = "action"
CHECK: Final = "check"
START: Final = "start"
RESTART: Final = "restart"
STOP: Final = "stop"
SLEEP: Final = "sleep"
WAKE: Final = "wake"
INTERRUPT: Final = "interrupt"
LOG: Final = "log"
EDIT_ON: Final = "edit_on"
EDIT_OFF: Final = "edit_off"
EDIT_CLEAR: Final = "edit_clear"
#: Which edits (`EDITS`, a list of names, or null for those that are on) run by default.
EDIT_DEFAULT: Final = "edit_default"
EDITS: Final = "edits"
END_ORPHAN: Final = "end_orphan"
#: What a cell, sent as `CELL`, would save: the answer's `FORECAST` is a record, or null where unknown.
FORECAST: Final = "forecast"
CELL: Final = "cell"

#: Reasons for steps that ran module by module, beside locations.
PROMPT: Final = "a prompt"
FIRST: Final = "the first step with a block"

#: How far an action is.
RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"


@dataclass(frozen=True)
class PanelEdit:
    """An edit of an engine.

    Attributes:
        on: Whether requests that name no edits run it: switched on or, where the engine has a choice, chosen.
        previous_source: That of the version before; "" where there is none.
        cell_id: The cell it came from; "" where there is none.
        cell_source: That cell, as it was run.
    """

    name: str
    version: int
    on: bool
    source: str
    previous_source: str
    cell_id: str
    cell_source: str
    owner: str
    hits: int
    errors: int
    last_error: str


@dataclass(frozen=True)
class PanelReason:
    """Why steps ran module by module.

    Attributes:
        why: A location, what a block names, `PROMPT` or `FIRST`.
        asker: The edit whose block it was, ``"trace"``, or "" where that is not told.
    """

    why: str
    asker: str
    steps: int


@dataclass(frozen=True)
class PanelSteps:
    """How an engine's steps ran, as far as is known without asking it.

    Attributes:
        known: Whether anything is; else the counts are 0 and say nothing.
        graphs: Whether there are graphs to replay.
        on_cpu: Whether there are none since it runs on a CPU.
        replayed: Steps that replayed a whole graph.
        tapped: Steps that replayed one which stops at taps.
        by_module: Steps that ran module by module.
        reasons: The commonest, first.
    """

    known: bool
    graphs: bool
    on_cpu: bool
    replayed: int
    tapped: int
    by_module: int
    reasons: list[PanelReason]


@dataclass(frozen=True)
class PanelEngine:
    """An engine of the kernel.

    Attributes:
        phase: What a start is doing, with `phase_s` since it began.
        options: As `name=value` texts.
        waiting: Sequences without a token yet.
        running: Sequences that are generating.
        tokens_per_s: Since the question before.
        kv_used: About which part of the KV cache is used, 0 to 1; -1 where that is not known.
        cause: Why it is dead.
        no_sleep: Why it cannot sleep; "" where it can.
        attach: The line that attaches another kernel to it; "" where none can.
        chooses_edits: Whether a choice of edits stands for "all that are on".
        default_edits: That choice, in the order they run; some may not be installed yet.
        steps: How its steps ran.
    """

    name: str
    state: str
    current: bool
    model: str
    mode: str
    phase: str
    phase_s: float
    options: list[str]
    waiting: int
    running: int
    tokens_per_s: float
    kv_used: float
    saves_bytes: int
    saves_disk_bytes: int
    saves_budget_bytes: int
    saves_requests: int
    up_s: float
    idle_s: float
    pids: list[int]
    memory_bytes: int
    gpu_bytes: int
    log: str
    cause: str
    no_sleep: str
    attach: str
    chooses_edits: bool
    default_edits: list[str]
    edits: list[PanelEdit]
    steps: PanelSteps


@dataclass(frozen=True)
class PanelSave:
    """One saved value of a recent request; no numbers of it.

    Attributes:
        code: An expression that reads it.
    """

    engine: str
    request_id: str
    block: str
    name: str
    step: int
    kind: str
    shape: list[int]
    dtype: str
    bytes: int
    prompt: str
    created: float
    code: str


@dataclass(frozen=True)
class PanelGpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        owner: Its user; "" where that may not be seen.
        bytes: -1 where the driver does not tell.
        ours: Whether it is of an engine of this user.
        engine: That engine's name, where it is one of this kernel; else "".
    """

    pid: int
    owner: str
    bytes: int
    ours: bool
    engine: str


@dataclass(frozen=True)
class PanelGpu:
    """A GPU of the kernel's machine, and who is on it as far as may be seen."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    processes: list[PanelGpuProcess]


@dataclass(frozen=True)
class PanelOrphan:
    """An engine of this user whose kernel is gone."""

    engine: str
    pids: list[int]
    memory_bytes: int
    gpu_bytes: int
    log: str


@dataclass(frozen=True)
class PanelAction:
    """An action that was asked for, and how far it is."""

    id: int
    action: str
    engine: str
    state: str
    text: str


@dataclass(frozen=True)
class PanelForecast:
    """What a cell would save, told before it runs.

    Attributes:
        saves: How many values, over all its requests; of an edit, of each request.
        of_edits: Those among them that edits save.
        requests: How many; 0 where that is not known, as of an edit.
        bytes: About how many, and `token_bytes` for each token of a prompt; -1 where that is not known.
        at_most: Whether it may be less: a condition, or an answer that stops early.
        at_least: Whether it may be more: a loop of unknown length.
        each_step: Whether as much comes again with every token that is generated.
    """

    saves: int
    of_edits: int
    requests: int
    bytes: int
    token_bytes: int
    at_most: bool
    at_least: bool
    each_step: bool


@dataclass(frozen=True)
class PanelStatus:
    """Everything the panel shows of a kernel.

    Attributes:
        importing_s: How long vLLM and nnsight have been imported for; 0 where they are not just now.
        gpus: How many GPUs the kernel's machine has; -1 until that was looked up.
        models: To choose from: started before, or in the local cache.
        with_saves: Whether `saves` were looked up; else it is empty and says nothing.
    """

    protocol: int
    version: str
    pid: int
    importing_s: float
    gpus: int
    devices: list[PanelGpu]
    engines: list[PanelEngine]
    orphans: list[PanelOrphan]
    actions: list[PanelAction]
    models: list[str]
    with_saves: bool
    saves: list[PanelSave]

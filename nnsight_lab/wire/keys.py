"""Names both ends of the engine's border use: one place per constant on the wire."""

from __future__ import annotations

#: In ``SamplingParams.extra_args``: the pickled block of a trace (bytes).
TRACE_KEY = "lab_trace"
#: In ``SamplingParams.extra_args``: the edits a request runs, as ``[registration id, ...]`` in order.
EDITS_KEY = "lab_edits"

#: The block name under which a trace's own saves come home; an edit cannot be called that.
TRACE_BLOCK = "trace"

#: In ``SamplingParams.extra_args``: how many bytes the request's blocks may save (int).
BUDGET_KEY = "lab_budget"

#: In vLLM's ``additional_config``: how a worker's saves travel (see `nnsight_lab.worker.courier`).
SAVES_CONFIG = "nnsight_lab_saves"

#: Worker methods reached by ``collective_rpc``.
COLLECT = "lab_collect"
REGISTER = "lab_register"
CLEAR = "lab_clear"
RELEASE = "lab_release"
FREE = "lab_free"
LENS = "lab_lens"
STEPS = "lab_steps"
COUNT = "nnsight_request_count"

#: Set for the processes of an engine while it starts: which engine, whose, and where to log.
ENGINE_ENV = "NNSIGHT_LAB_ENGINE"
OWNER_ENV = "NNSIGHT_LAB_OWNER"
LOG_ENV = "NNSIGHT_LAB_LOG"

"""Names both ends of the engine's border use: one place per constant on the wire."""

from __future__ import annotations

#: In ``SamplingParams.extra_args``: the pickled block of a trace (bytes).
TRACE_KEY = "lab_trace"
#: In ``SamplingParams.extra_args``: the edits a request runs, as ``[registration id, ...]`` in order.
EDITS_KEY = "lab_edits"

#: The block name under which a trace's own saves come home; an edit cannot be called that.
TRACE_BLOCK = "trace"

#: Worker methods reached by ``collective_rpc``.
COLLECT = "lab_collect"
REGISTER = "lab_register"
CLEAR = "lab_clear"
COUNT = "nnsight_request_count"

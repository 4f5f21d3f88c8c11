"""What happened to the server, a line each: JSON on stderr, where a journal takes it, and audited."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from nnsight_lab.server.audit import audit


def note(event: str, **told: Any) -> None:
    """Write a line.

    Args:
        event: What happened, in a word or two.
        **told: Names and numbers; never a token, a prompt, or what a block holds.
    """
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    whose = str(told.get("by") or told.get("user") or "")
    audit.note(event, whose, **{name: value for name, value in told.items() if name not in ("by", "user")})
    print(json.dumps({"at": when, "nnsight_lab": event, **told}), file=sys.stderr, flush=True)

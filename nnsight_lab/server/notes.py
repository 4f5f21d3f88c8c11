"""What happened to the server, a line each: as JSON on stderr, where a service's journal takes it."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def note(event: str, **told: Any) -> None:
    """Write a line.

    Args:
        event: What happened, in a word or two.
        **told: Names and numbers; never a token, a prompt, or what a block holds.
    """
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(json.dumps({"at": when, "nnsight_lab": event, **told}), file=sys.stderr, flush=True)

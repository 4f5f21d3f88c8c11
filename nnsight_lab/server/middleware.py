"""The guard as vLLM adds it: by name, on its command line, outside all else.

Not by the plugin: vLLM goes on without a plugin that fails, and would then serve everybody. A middleware that
cannot be made ends the server's start.
"""

from __future__ import annotations

from typing import Any

from nnsight_lab.server.audit import audit
from nnsight_lab.server.command import Settings
from nnsight_lab.server.guard import Guard


class ServedGuard(Guard):
    """The guard of the server that `nnsight-lab serve` starts.

    Args:
        app: What is guarded.
    """

    def __init__(self, app: Any) -> None:
        settings = Settings.left()
        if settings.audit:
            audit.open(settings.audit)
        super().__init__(
            app,
            identity=settings.identity(),
            limits=settings.limits,
            prefix=settings.prefix,
            metrics_token=settings.metrics_token,
        )

"""A CPU worker that tells what each of its steps was."""

from __future__ import annotations

from typing import Any

from nnsight_lab.worker.cpu import LabCPUWorker


class TellingCPUWorker(LabCPUWorker):
    """Keeps how many tokens of which request each step had."""

    def execute_model(self, scheduler_output: Any, *args: Any, **settings: Any) -> Any:
        """A step."""
        self.__dict__.setdefault("told", []).append(dict(scheduler_output.num_scheduled_tokens))
        return super().execute_model(scheduler_output, *args, **settings)

    def steps_told(self) -> list[dict[str, int]]:
        """Tokens by request of each step since this was last asked."""
        told: list[dict[str, int]] = self.__dict__.pop("told", [])
        return told

"""A CPU worker that acts replays out, where there are no CUDA graphs.

In a step that a graph would replay the modules run, but only taps may serve a block.
"""

from __future__ import annotations

from nnsight_lab.worker.cpu import LabCPUWorker


class ActingCPUWorker(LabCPUWorker):
    """This package's CPU worker; replays are acted out once it is told so."""

    def act_replays(self, acts: bool) -> None:
        """Act replays out from the next step on, or run every module again."""
        self.model_runner.acts_replays = acts

"""Runs that are seen while they run: a token strip that grows, and heatmaps of what is saved step by step."""

from nnsight_lab.runs.run import LiveRun
from nnsight_lab.runs.scores import wants_logprobs
from nnsight_lab.runs.view import LiveView

__all__ = ["LiveRun", "LiveView", "wants_logprobs"]

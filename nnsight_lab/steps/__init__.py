"""Edits as data: a list of steps, each an operation at a site, on positions; no code of anybody's travels.

``lab.edit("steer", steps=[lab.steps.add("model.layers.5", vector, scale=3, positions="last")])`` runs on
every engine, and is all that one of level ``strict`` takes. A step says what a hand-written block would do,
from a list that is fixed here; it is checked against the model before anything is installed. What is not in
the list is not expressible, and nothing in a step is ever read as Python.
"""

from __future__ import annotations

from nnsight_lab.steps.making import ablate, add, clamp, patch, project_out, read, scale, set
from nnsight_lab.steps.step import OPS, Step

__all__ = ["OPS", "Step", "ablate", "add", "clamp", "patch", "project_out", "read", "scale", "set"]

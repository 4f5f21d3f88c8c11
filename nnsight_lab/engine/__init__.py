"""Engines that stay alive across cells, and everything a caller does with one."""

from __future__ import annotations

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before anything here imports nnsight)

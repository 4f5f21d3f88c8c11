"""What runs inside vLLM's worker processes; nothing here is imported by a kernel.

`cpu` and `gpu` are the two worker classes vLLM is told to build; `process` is the plugin every
process of the engine loads first.
"""

from __future__ import annotations

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before anything here imports nnsight)

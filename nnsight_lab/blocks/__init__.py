"""A block of the user's code, from the cell it was written in to the worker and back.

`block` takes the source out of the frame and rebuilds it in the worker with its own line numbers;
`errors` brings an exception of the worker home to those lines. Both ends of the process border
import this room, so it holds nothing of the engine and nothing of the worker.

It is the first room that imports nnsight, which mounts ``.save`` on every object; anyio then refuses
each of its own classes that is defined later ("Attribute 'save' is missing its type annotation"), and
vLLM, httpx and mcp import them. So anyio is imported whole, before.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

with contextlib.suppress(ImportError):
    import anyio._backends._asyncio
    import anyio.streams

    for _module in pkgutil.iter_modules(anyio.streams.__path__):
        importlib.import_module(f"anyio.streams.{_module.name}")

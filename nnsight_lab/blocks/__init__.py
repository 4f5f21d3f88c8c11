"""A block of the user's code, from the cell it was written in to the worker and back.

`block` takes the source out of the frame and rebuilds it in the worker with its own line numbers;
`errors` brings an exception of the worker home to those lines. Both ends of the process border
import this room, so it holds nothing of the engine and nothing of the worker.

It is the first room that imports nnsight, which mounts ``.save`` on every object; anyio then refuses
each of its own classes that is defined later ("Attribute 'save' is missing its type annotation"), and
vLLM, httpx and mcp import them. So anyio is imported whole, before; in a program that imported nnsight
first, the mount is taken off for that moment.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def _unmounted() -> Iterator[None]:
    """Objects without nnsight's ``.save``, where they have it already."""
    mounted = getattr(object, "save", None) if "nnsight" in sys.modules else None
    if mounted is None:
        yield
        return
    from nnsight._c import mount, unmount  # of nnsight itself: the way it puts it there

    unmount("save")
    try:
        yield
    finally:
        mount(mounted, "save")


with contextlib.suppress(ImportError), _unmounted():
    import anyio._backends._asyncio
    import anyio.streams

    for _module in pkgutil.iter_modules(anyio.streams.__path__):
        importlib.import_module(f"anyio.streams.{_module.name}")

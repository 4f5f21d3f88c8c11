"""``tracer.cache()`` as plain data: what was seen, by module path.

nnsight's view of a cache resolves names in the model's tree, which stays in the worker. What it holds
is tensors by path, so that is what goes home: ``cache["model.model.layers.3"].output`` reads the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnsight.intervention.cache import CacheView


@dataclass(frozen=True, eq=False)
class CachedModule:
    """One module of a cache; a list of a value per visit where the module was reached more than once.

    Attributes:
        output: What it returned; None where outputs were not asked for.
        inputs: ``(args, kwargs)``; None where inputs were not asked for.
        input: The first of them.
    """

    output: Any
    inputs: Any
    input: Any


def plain(value: Any) -> Any:
    """A cache as ``{path: CachedModule}``; anything else as it is."""
    if not isinstance(value, CacheView):
        return value
    seen = {}
    for path in value.keys():  # noqa: SIM118  (a view is no mapping: its `in` and its length are a module's)
        module = CacheView(value._cache, None, path=path)
        seen[path] = CachedModule(module.output, module.inputs, module.input)
    return seen

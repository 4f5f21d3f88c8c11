"""The names of vLLM's engine options, also before vLLM was imported.

A form that is typed in should know a misspelt option at once, and importing vLLM takes ten seconds. So until
it is imported the names are read from its source: the annotated fields of `EngineArgs`, in a fiftieth of a
second, once. Where that cannot be found nothing is refused here, and the start itself says what is wrong.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path

_MODULE = "vllm.engine.arg_utils"
_CLASS = "EngineArgs"
#: What vLLM's server takes besides, such as ``lora_modules``; where it listens and who is let in are
#: elsewhere.
_SERVED = "BaseFrontendArgs"
_SERVED_IN = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")


def option_names() -> frozenset[str]:
    """Every option `EngineArgs` has; empty where that cannot be told."""
    loaded = sys.modules.get(_MODULE)
    found = getattr(loaded, _CLASS, None)
    if found is not None:
        return frozenset(field.name for field in dataclasses.fields(found))
    return _from_source()


def served_option_names() -> frozenset[str]:
    """Those and what a server takes besides; empty where that cannot be told."""
    names = option_names()
    return names | frozenset().union(*(_fields(path, _SERVED) for path in _SERVED_IN)) if names else names


def _from_source() -> frozenset[str]:
    return _fields("engine/arg_utils.py", _CLASS)


@functools.cache
def _fields(path: str, kind: str) -> frozenset[str]:
    """The annotated fields of a class of vLLM's."""
    try:
        spec = importlib.util.find_spec("vllm")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        tree = ast.parse(Path(places[0], path).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, IndexError, ImportError):
        return frozenset()
    return frozenset(
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )

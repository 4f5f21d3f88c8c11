"""`%engine`, `%edits` and `%saves` lines as the API calls that do the same, for an exported script."""

from __future__ import annotations

import ast

from nnsight_lab.magics.commands import (
    AttachEngine,
    DefaultEdits,
    EditsCommand,
    EngineCommand,
    EngineLog,
    ListEdits,
    ListEngines,
    ListSaves,
    ReadSaves,
    SavesCommand,
    ShowSaves,
    StartEngine,
    WriteSaves,
)

_BIND_MODEL = "model = engine.model"


def engine_calls(command: EngineCommand) -> list[str]:
    """The statements that a `%engine` line stands for."""
    if isinstance(command, StartEngine):
        options = [f"{name}={quoted(source)}" for name, source in command.options.items()]
        if command.restart:
            options.append("restart=True")
        return [f"engine = lab.start({', '.join([quoted(command.model), *options])})", _BIND_MODEL]
    if isinstance(command, AttachEngine):
        options = [f"{name}={quoted(source)}" for name, source in command.options.items()]
        url = [] if command.url is None else [quoted(command.url)]
        return [f"engine = lab.attach({', '.join([*url, *options])})", _BIND_MODEL]
    if isinstance(command, ListEngines):
        return ["print(*lab.engines())"]
    if isinstance(command, EngineLog):
        return [f"print(lab.get_engine({_name(command.name)}).log.tail({command.lines}))"]
    name = _name(command.name)
    if command.action == "stop":
        return [f"print(lab.stop({name}))"]
    if command.action == "detach":
        return [f"lab.detach({name})"]
    if command.action == "restart":
        return [f"engine = lab.restart({name})", _BIND_MODEL]
    if command.action in ("sleep", "wake"):
        return [f"lab.get_engine({name}).{command.action}()"]
    return [f"print(lab.get_engine({name}).status())"]


def edits_calls(command: EditsCommand) -> list[str]:
    """The statements that a `%edits` line stands for."""
    edits = f"lab.get_engine({_name(command.engine)}).edits"
    if isinstance(command, ListEdits):
        return [f'print(*{edits}, sep="\\n")']
    if isinstance(command, DefaultEdits):
        names = "None" if command.names is None else f"[{', '.join(map(quoted, command.names))}]"
        return [f"lab.get_engine({_name(command.engine)}).default_edits = {names}"]
    if not command.names:
        return [f"{edits}.clear()"]
    method = {"on": "switch_on", "off": "switch_off", "clear": "clear"}[command.action]
    return [f"{edits}[{quoted(name)}].{method}()" for name in command.names]


def saves_calls(command: SavesCommand) -> list[str]:
    """The statements that a `%saves` line stands for."""
    if isinstance(command, ShowSaves):
        return []  # a script shows none anyway
    saves = f"lab.saves({_name(command.engine)})"
    if isinstance(command, ListSaves):
        # What other kernels wrote is for a reader, not for a script.
        return [] if command.files_only else [f"print({saves})"]
    if isinstance(command, ReadSaves):
        return [f"{saves}.adopt(lab.read({quoted(command.path)}))"]
    if isinstance(command, WriteSaves):
        requests = "".join(f", [{', '.join(map(quoted, command.requests))}]" for _ in command.requests[:1])
        return [f"{saves}.write({quoted(command.path)}{requests})"]
    if not command.requests:
        return [f"{saves}.clear()"]
    return [f"{saves}.{command.action}({quoted(name)})" for name in command.requests]


def quoted(source: str) -> str:
    """Python source, a plain string in double quotes."""
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return source
    if isinstance(value, str) and value.isprintable() and not set(value) & set('"\\'):
        return f'"{value}"'
    return source


def _name(source: str | None) -> str:
    return "" if source is None else quoted(source)

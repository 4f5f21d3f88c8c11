"""What a `%engine`, `%edits` or `%saves` line says, as data.

One reading serves two readers: `lines` runs a command, `export` writes the API call that does the same.
Values are Python source (see `arguments`). A wrong line is one plain line with the nearest sub-command and
the correct form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nnsight_lab.errors import CellUsageError, nearest
from nnsight_lab.magics.arguments import Arguments, read_arguments, text_expression

#: Every sub-command of `%engine`, with its correct form.
ENGINE_FORMS: dict[str, str] = {
    "start": "%engine start MODEL option=value … [--restart] [--keep]",
    "attach": "%engine attach [URL or NAME] [name=NAME]",
    "detach": "%engine detach [NAME]",
    "status": "%engine status [NAME]",
    "stop": "%engine stop [NAME]",
    "restart": "%engine restart [NAME]",
    "sleep": "%engine sleep [NAME]",
    "wake": "%engine wake [NAME]",
    "list": "%engine list",
    "log": "%engine log [NAME] [-n LINES]",
}
#: Every sub-command of `%edits`, with its correct form.
EDITS_FORMS: dict[str, str] = {
    "on": "%edits on NAME …",
    "off": "%edits off NAME …",
    "default": "%edits default NAME … (or all, or none)",
    "clear": "%edits clear NAME … (or --all)",
}
#: Every sub-command of `%saves`, with its correct form.
SAVES_FORMS: dict[str, str] = {
    "table": "%saves table [engine=NAME]",
    "write": "%saves write PATH [REQUEST …]",
    "read": "%saves read PATH",
    "keep": "%saves keep REQUEST …",
    "drop": "%saves drop REQUEST … (or all)",
    "files": "%saves files",
    "show": "%saves show on|off",
}
#: How many lines `%engine log` shows.
LOG_LINES = 40


@dataclass(frozen=True)
class StartEngine:
    """`%engine start MODEL option=value … [--restart] [--keep]`; `--keep` is the option `keep=True`."""

    model: str
    options: Mapping[str, str] = field(default_factory=dict)
    restart: bool = False


@dataclass(frozen=True)
class AttachEngine:
    """`%engine attach [URL or NAME] [name=NAME]`; None for the engine that is kept."""

    url: str | None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedEngine:
    """`%engine status|stop|detach|restart|sleep|wake [NAME]`; without a name, the current engine."""

    action: Literal["status", "stop", "detach", "restart", "sleep", "wake"]
    name: str | None = None


@dataclass(frozen=True)
class ListEngines:
    """`%engine list`."""


@dataclass(frozen=True)
class EngineLog:
    """`%engine log [NAME] [-n LINES]`."""

    name: str | None = None
    lines: int = LOG_LINES


@dataclass(frozen=True)
class ListEdits:
    """`%edits`."""

    engine: str | None = None


@dataclass(frozen=True)
class SwitchEdits:
    """`%edits on|off|clear NAME …`; no names for `--all`."""

    action: Literal["on", "off", "clear"]
    names: tuple[str, ...]
    engine: str | None = None


@dataclass(frozen=True)
class DefaultEdits:
    """`%edits default NAME …`; None for `all`, no names for `none`."""

    names: tuple[str, ...] | None
    engine: str | None = None


@dataclass(frozen=True)
class ListSaves:
    """`%saves`; `%saves table`, which browses nothing; `%saves files`, which leaves out what is in memory."""

    engine: str | None = None
    files_only: bool = False
    table_only: bool = False


@dataclass(frozen=True)
class ShowSaves:
    """`%saves show on|off`: whether cells show what they saved."""

    on: bool


@dataclass(frozen=True)
class WriteSaves:
    """`%saves write PATH [REQUEST …]`; no requests for all."""

    path: str
    requests: tuple[str, ...] = ()
    engine: str | None = None


@dataclass(frozen=True)
class ReadSaves:
    """`%saves read PATH`."""

    path: str
    engine: str | None = None


@dataclass(frozen=True)
class MarkSaves:
    """`%saves keep|drop REQUEST …`; no requests for `drop all`."""

    action: Literal["keep", "drop"]
    requests: tuple[str, ...]
    engine: str | None = None


EngineCommand = StartEngine | AttachEngine | NamedEngine | ListEngines | EngineLog
EditsCommand = ListEdits | SwitchEdits | DefaultEdits
SavesCommand = ListSaves | ShowSaves | WriteSaves | ReadSaves | MarkSaves


def read_engine(line: str) -> EngineCommand:
    """Reads a `%engine` line; an empty one asks for the status.

    Raises:
        CellUsageError: It is not one of `ENGINE_FORMS`.
    """
    action, rest = _split("%engine", line, ENGINE_FORMS)
    if action == "start":
        return _read_start(rest)
    if action == "attach":
        return _read_attach(rest)
    if action == "log":
        return _read_log(rest)
    form = ENGINE_FORMS[action or "status"]
    arguments = read_arguments(rest, form=form)
    if action == "list":
        _refuse_more(arguments, 0, form)
        return ListEngines()
    _refuse_more(arguments, 1, form)
    name = text_expression(arguments.words[0]) if arguments.words else None
    if action == "stop":
        return NamedEngine("stop", name)
    if action == "detach":
        return NamedEngine("detach", name)
    if action == "restart":
        return NamedEngine("restart", name)
    if action == "sleep":
        return NamedEngine("sleep", name)
    if action == "wake":
        return NamedEngine("wake", name)
    return NamedEngine("status", name)


def read_edits(line: str) -> EditsCommand:
    """Reads a `%edits` line; an empty one asks for the table.

    Raises:
        CellUsageError: It is not one of `EDITS_FORMS`.
    """
    first = line.split(None, 1)[0] if line.split() else ""
    if not first or first.startswith("engine="):
        arguments = read_arguments(line, form="%edits [engine=NAME]")
        _refuse_more(arguments, 0, "%edits [engine=NAME]", options=("engine",))
        return ListEdits(arguments.options.get("engine"))
    action, rest = _split("%edits", line, EDITS_FORMS)
    form = EDITS_FORMS[action]
    arguments = read_arguments(rest, form=form, flags=("--all",) if action == "clear" else ())
    _refuse_more(arguments, len(arguments.words), form, options=("engine",))
    if bool(arguments.words) == bool(arguments.flags):
        raise CellUsageError(f"%edits {action} needs the names of edits. Write: {form}")
    names = tuple(text_expression(word) for word in arguments.words)
    engine = arguments.options.get("engine")
    if action == "default":
        if len(arguments.words) == 1 and arguments.words[0] in ("all", "none"):
            return DefaultEdits(None if arguments.words == ("all",) else (), engine)
        return DefaultEdits(names, engine)
    if action == "on":
        return SwitchEdits("on", names, engine)
    if action == "off":
        return SwitchEdits("off", names, engine)
    return SwitchEdits("clear", names, engine)


def read_saves(line: str) -> SavesCommand:
    """Reads a `%saves` line; an empty one asks for the table.

    Raises:
        CellUsageError: It is not one of `SAVES_FORMS`.
    """
    first = line.split(None, 1)[0] if line.split() else ""
    if not first or first.startswith("engine="):
        form = "%saves [engine=NAME]"
        arguments = read_arguments(line, form=form)
        _refuse_more(arguments, 0, form, options=("engine",))
        return ListSaves(arguments.options.get("engine"))
    action, rest = _split("%saves", line, SAVES_FORMS)
    form = SAVES_FORMS[action]
    arguments = read_arguments(rest, form=form)
    if action == "show":
        if arguments.options or arguments.words not in (("on",), ("off",)):
            raise CellUsageError(f"%saves show is on or off, not {rest.strip() or 'nothing'}. Write: {form}")
        return ShowSaves(arguments.words == ("on",))
    words = tuple(text_expression(word) for word in arguments.words)
    most = {"files": 0, "table": 0, "read": 1}.get(action, len(words))
    _refuse_more(arguments, most, form, options=() if action == "files" else ("engine",))
    engine = arguments.options.get("engine")
    if action == "files":
        return ListSaves(files_only=True)
    if action == "table":
        return ListSaves(engine, table_only=True)
    if not words:
        wants = "a path" if action in ("write", "read") else "a request"
        raise CellUsageError(f"%saves {action} needs {wants}. Write: {form}")
    if action == "write":
        return WriteSaves(words[0], words[1:], engine)
    if action == "read":
        return ReadSaves(words[0], engine)
    if action == "keep":
        return MarkSaves("keep", words, engine)
    return MarkSaves("drop", () if arguments.words == ("all",) else words, engine)


def _read_start(rest: str) -> StartEngine:
    form = ENGINE_FORMS["start"]
    arguments = read_arguments(rest, form=form, flags=("--restart", "--keep"))
    if len(arguments.words) != 1:
        got = f"; got {', '.join(arguments.words)}" if arguments.words else ""
        raise CellUsageError(f"%engine start takes one model{got}. Write: {form}")
    options = dict(arguments.options)
    if options.pop("restart", "False") not in ("True", "False"):
        raise CellUsageError(f"restart= is True or False. Write: {form}")
    restart = "--restart" in arguments.flags or arguments.options.get("restart") == "True"
    if "--keep" in arguments.flags:
        options["keep"] = "True"
    if options.get("keep", "False") not in ("True", "False"):
        raise CellUsageError(f"keep= is True or False. Write: {form}")
    if options.get("keep") == "False":
        del options["keep"]
    if "idle_minutes" in options and "keep" not in options:
        raise CellUsageError(f"idle_minutes= is of an engine that is kept: add --keep. Write: {form}")
    return StartEngine(text_expression(arguments.words[0]), options, restart)


def _read_attach(rest: str) -> AttachEngine:
    form = ENGINE_FORMS["attach"]
    arguments = read_arguments(rest, form=form)
    if len(arguments.words) > 1:
        raise CellUsageError(
            "%engine attach takes one address of a server, or the name of an engine that you keep. "
            f"Write: {form}"
        )
    _refuse_more(arguments, 1, form, options=("name", "token"))
    url = text_expression(arguments.words[0]) if arguments.words else None
    return AttachEngine(url, dict(arguments.options))


def _read_log(rest: str) -> EngineLog:
    form = ENGINE_FORMS["log"]
    words = rest.split()
    lines = LOG_LINES
    if "-n" in words:
        at = words.index("-n")
        count = words[at + 1] if at + 1 < len(words) else ""
        if not count.isdecimal():
            raise CellUsageError(f"-n takes a number of lines; got {count!r}. Write: {form}")
        lines = int(count)
        del words[at : at + 2]
    arguments = read_arguments(" ".join(words), form=form)
    _refuse_more(arguments, 1, form)
    return EngineLog(text_expression(arguments.words[0]) if arguments.words else None, lines)


def _split(magic: str, line: str, forms: Mapping[str, str]) -> tuple[str, str]:
    """The sub-command and what follows it."""
    words = line.split(None, 1)
    if not words:
        return "", ""
    action, rest = words[0], words[1] if len(words) > 1 else ""
    if action not in forms:
        hint = nearest(action, forms)
        form = next((forms[known] for known in forms if f"{known!r}" in hint), f"{magic} {'|'.join(forms)}")
        raise CellUsageError(f"{magic} has no sub-command {action!r}.{hint} Write: {form}")
    return action, rest


def _refuse_more(arguments: Arguments, words: int, form: str, options: tuple[str, ...] = ()) -> None:
    wrong = [*arguments.words[words:], *(f"{name}=" for name in arguments.options if name not in options)]
    if wrong:
        raise CellUsageError(f"{', '.join(wrong)} is not understood here. Write: {form}")

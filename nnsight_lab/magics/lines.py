"""`%engine`, `%edits` and `%saves`: the engine, its edits and what was saved, from a line of a notebook.

Each sub-command is one call of the API, and its answer one sentence or one small table. An engine's start
takes from seconds to minutes, so it shows one line that moves: a start without a sign of life is
interrupted by its user. Errors of the engine are plain lines already, and pass through untouched.
"""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import no_var_expand

from nnsight_lab.magics.arguments import evaluate
from nnsight_lab.magics.commands import (
    ENGINE_FORMS,
    AttachEngine,
    DefaultEdits,
    EngineLog,
    ListEdits,
    ListEngines,
    NamedEngine,
    StartEngine,
    SwitchEdits,
    read_edits,
    read_engine,
    read_saves,
)
from nnsight_lab.magics.contract import Engine, chosen_engine, lab
from nnsight_lab.magics.describe import warm
from nnsight_lab.magics.drawing import Drawing, sentence, show, table
from nnsight_lab.magics.looking import CellViews
from nnsight_lab.magics.saves_line import run_saves
from nnsight_lab.magics.start_line import StartLine


class LineMagics:
    """The line magics, bound to a shell."""

    def __init__(self, shell: InteractiveShell, views: CellViews) -> None:
        self._shell = shell
        self._views = views

    @no_var_expand
    def engine(self, line: str = "") -> None:
        """Starts, shows and stops engines.

        %engine start MODEL option=value … [--restart] [--keep]
            Starts an engine and binds `engine` and `model`. A live engine of the same name and
            configuration is taken as it is. Options are those of `lab.start` (`name=`, `mode=`) and of
            vLLM (`max_model_len=512`, `dtype=bfloat16`, `tensor_parallel_size=2`); values are Python
            literals, else strings; `$name` and `{expression}` are your variables.
            With `--keep` it runs in a process of its own that outlives the kernel, until it is stopped, or
            nobody used it for `idle_minutes=240` (0: for ever). Where it runs already it is attached to.
        %engine attach [NAME]          takes an engine that you keep; without a name, the only one
        %engine attach URL [name=NAME]
            Uses an engine that `nnsight-lab serve` runs, and binds `engine` and `model`: `http://host:8000`,
            a JupyterHub service's address, or `unix:/path/of/socket`. Who you are is told by
            `$NNSIGHT_LAB_TOKEN`, or by this server's JupyterHub token.
        %engine detach [NAME]          lets go of a kept or shared engine, which goes on
        %engine
        %engine status [NAME]          what the engine is and does
        %engine list                   every engine of this kernel, and those that you keep
        %engine log [NAME] [-n LINES]  the end of its log
        %engine restart [NAME]         stops it and starts it again, with the same configuration
        %engine stop [NAME]            stops it, and frees its memory; a kept one for every kernel
        %engine sleep [NAME]           frees its GPU, and keeps its weights; the next request wakes it
        %engine wake [NAME]            wakes it now
        """
        command = read_engine(line)
        if isinstance(command, StartEngine):
            self._start(command)
        elif isinstance(command, AttachEngine):
            self._attach(command)
        elif isinstance(command, ListEngines):
            self._list()
        elif isinstance(command, EngineLog):
            self._log(command)
        else:
            self._named(command)

    @no_var_expand
    def edits(self, line: str = "") -> None:
        """Shows and switches the edits that `%%edit` cells left on an engine.

        %edits                     every edit: its version, whether it is on, hits, errors
        %edits on NAME …           requests run it from now on
        %edits off NAME …          they do not, and it stays installed
        %edits default NAME …      requests that name no edits run exactly these, whatever is on
        %edits default all         they run all that are on, as before; `none`: they run none
        %edits clear NAME …        removes it
        %edits clear --all         removes every edit

        `engine=NAME` at the end of any of these names another engine than the current one.
        """
        command = read_edits(line)
        engine = chosen_engine(self._name(command.engine))
        if isinstance(command, ListEdits):
            show(edits_table(engine))
            return
        if isinstance(command, DefaultEdits):
            self._default(engine, command)
            return
        self._switch(engine, command)

    @no_var_expand
    def saves(self, line: str = "") -> Any:
        """Shows, writes and finds what requests saved.

        %saves                             the saves, to sort, search, open and compare, then the files
        %saves table                       the newest as a plain table, then the files that were written
        %saves write PATH [REQUEST …]      writes them, or those of some requests: PATH.safetensors and its
                                           labels, PATH.json
        %saves read PATH                   takes a file's saves in, and gives the file: `f = %saves read PATH`
        %saves keep REQUEST …              never spills nor drops them
        %saves drop REQUEST …              lets go of them, in memory and on disk
        %saves drop all                    lets go of everything
        %saves files                       the files that were written: this kernel's, then those of others
        %saves show on|off                 whether the line below a `%%trace` cell says what it saved

        A request is named by its id (`output.request_id`), or as much of it as no other begins with.
        `engine=NAME` at the end of any but the last two names another engine than the current one. The
        table is bound to `browser`: `browser.selected` is the save that is opened. In Python:
        `engine.saves`, `lab.read(PATH)`.
        """
        return run_saves(read_saves(line), self._shell.user_ns, self._views)

    def _start(self, command: StartEngine) -> None:
        model = evaluate(command.model, self._shell.user_ns)
        options = {name: evaluate(source, self._shell.user_ns) for name, source in command.options.items()}
        if not isinstance(model, str):
            model = str(model)  # a Path
        name = str(options.get("name", "main"))
        wait = StartLine(f"engine {name}", model)
        engine = wait.around(
            lambda: lab().start(model, restart=command.restart, progress=wait.progress, **options)
        )
        self._bind(engine)

    def _attach(self, command: AttachEngine) -> None:
        url = None if command.url is None else str(evaluate(command.url, self._shell.user_ns))
        options = {
            name: str(evaluate(source, self._shell.user_ns)) for name, source in command.options.items()
        }
        engine = lab().attach(url, **options)
        status = engine.status()
        kind = ", ".join(part for part in (engine.mode, status.device) if part)
        show(sentence(f"engine {engine.name}: attached to {status.model} ({kind})"))
        self._bind(engine)

    def _named(self, command: NamedEngine) -> None:
        name = self._name(command.name)
        if command.action == "stop":
            kept = (
                name is not None and name not in lab().engines() and any(k.name == name for k in lab().kept())
            )
            show(sentence(str(lab().stop(name if kept else chosen_engine(name).name))))
        elif command.action == "detach":
            engine = chosen_engine(name)
            line = engine.attach_line()
            lab().detach(engine.name)
            show(sentence(f"engine {engine.name}: let go, and goes on. {line} takes it again."))
        elif command.action == "restart":
            name = chosen_engine(name).name
            wait = StartLine(f"engine {name}", "")
            self._bind(wait.around(lambda: lab().restart(name, progress=wait.progress)))
        elif command.action in ("sleep", "wake"):
            engine = chosen_engine(name)
            engine.sleep() if command.action == "sleep" else engine.wake()
            said = "sleeps; the next request wakes it" if command.action == "sleep" else "is awake"
            show(sentence(f"Engine {engine.name} {said}."))
        elif name is None and not lab().engines():
            self._list()
        else:
            show(status_drawing(chosen_engine(name)))

    def _list(self) -> None:
        engines = lab().engines()
        attached = {engine.id for engine in engines.values()}
        kept = [one for one in lab().kept() if one.engine not in attached]
        if not engines and not kept:
            show(sentence(f"No engine is running. Start one: {ENGINE_FORMS['start']}"))
            return
        current = chosen_engine().name if engines else ""
        rows = [
            (name, engine.status().model, engine.mode, engine.status().state, "current" * (name == current))
            for name, engine in engines.items()
        ]
        rows += [
            (one.name, one.model, "", "kept" if one.ready else "starting", one.attach_line) for one in kept
        ]
        show(table(("name", "model", "mode", "state", ""), rows))

    def _log(self, command: EngineLog) -> None:
        log = chosen_engine(self._name(command.name)).log
        show(sentence(f"{log.tail(command.lines).rstrip()}\n\nThe whole log: {log.path}"))

    def _switch(self, engine: Engine, command: SwitchEdits) -> None:
        if not command.names:
            count = len(list(engine.edits))
            engine.edits.clear()
            show(sentence(f"Cleared {count} edit{'' if count == 1 else 's'} of engine {engine.name}."))
            return
        names = [str(evaluate(source, self._shell.user_ns)) for source in command.names]
        edits = [engine.edits[name] for name in names]  # all are looked up before any is switched
        for edit in edits:
            if command.action == "on":
                edit.switch_on()
            elif command.action == "off":
                edit.switch_off()
            else:
                edit.clear()
        done = {"on": "on", "off": "off", "clear": "cleared"}[command.action]
        show(sentence(f"{', '.join(names)}: {done}"))

    def _default(self, engine: Engine, command: DefaultEdits) -> None:
        if command.names is None:
            engine.edits.default = None
            show(sentence("Requests that name no edits run all that are on."))
            return
        names = [str(evaluate(source, self._shell.user_ns)) for source in command.names]
        engine.edits.default = names
        missing = engine.edits.missing()
        said = f"Requests that name no edits run {', '.join(names) or 'none'}."
        if missing:
            said += f" Refused until it is installed: {', '.join(missing)}."
        show(sentence(said))

    def _bind(self, engine: Engine) -> None:
        self._shell.user_ns.update({"engine": engine, "model": engine.model})
        warm(engine.model)  # a tenth of a second here, and none at the first Tab

    def _name(self, source: str | None) -> str | None:
        return None if source is None else str(evaluate(source, self._shell.user_ns))


def edits_table(engine: Engine) -> Drawing:
    """The edits of an engine, one a row."""
    rows: list[tuple[Any, ...]] = [
        (
            edit.name,
            edit.version,
            engine.edits.standing(edit),
            edit.hits,
            f"{edit.errors}: {first_line(edit.last_error)}" if edit.errors else "0",
        )
        for edit in engine.edits
    ]
    if not rows:
        return sentence(f"Engine {engine.name} has no edits. A cell that starts with %%edit NAME leaves one.")
    return table(("edit", "version", "", "hits", "errors"), rows)


def status_drawing(engine: Engine) -> Drawing:
    """An engine's status: a table of two columns, and its own text."""
    status = engine.status()
    return Drawing(table(("", ""), status.rows()).html, str(status))


def first_line(value: object) -> str:
    """The first line of a value's text."""
    return (str(value).strip().splitlines() or [""])[0]

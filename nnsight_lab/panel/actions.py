"""What the panel may ask for, and how far it is.

An action comes over the control channel, whose thread also takes interrupts, so nothing is waited for here:
what takes long runs on a thread of its own and is told in the next status. An action enters an engine only
through its own methods and the manager, as a cell does.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nnsight_lab
from nnsight_lab.engine import processes
from nnsight_lab.engine.config import OWN_OPTIONS, EngineConfig, refuse_unknown
from nnsight_lab.engine.option_names import option_names, served_option_names
from nnsight_lab.errors import CellUsageError, LabError
from nnsight_lab.magics.arguments import evaluate
from nnsight_lab.magics.commands import StartEngine, read_engine
from nnsight_lab.panel import snapshot
from nnsight_lab.panel.forecast import Forecasts
from nnsight_lab.panel.surroundings import Surroundings
from nnsight_lab.wire import panel as wire

if TYPE_CHECKING:
    from nnsight_lab.engine.local import Engine

_KEPT = 8
_LOG_LINES = 400
Answer = dict[str, Any]


class Actions:
    """Takes actions, and remembers the last few.

    Args:
        surroundings: Told when processes come and go.
        namespace: The notebook's: `$name` in an option is read there, and a started engine is bound there.
    """

    def __init__(self, surroundings: Surroundings, namespace: MutableMapping[str, Any]) -> None:
        self._surroundings = surroundings
        self._namespace = namespace
        self._ids = itertools.count(1)
        self._latest: deque[wire.PanelAction] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._forecasts = Forecasts(namespace)
        self._known: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            wire.CHECK: self._check,
            wire.START: self._start,
            wire.RESTART: self._restart,
            wire.STOP: self._stop,
            wire.INTERRUPT: self._interrupt,
            wire.SLEEP: self._sleep,
            wire.WAKE: self._wake,
            wire.LOG: self._log,
            wire.EDIT_ON: self._edit_on,
            wire.EDIT_OFF: self._edit_off,
            wire.EDIT_CLEAR: self._edit_clear,
            wire.EDIT_DEFAULT: self._edit_default,
            wire.END_ORPHAN: self._end_orphan,
            wire.FORECAST: self._forecast,
        }

    def latest(self) -> list[wire.PanelAction]:
        """The last few, oldest first."""
        with self._lock:
            return list(self._latest)

    def take(self, content: Mapping[str, Any]) -> Answer:
        """Do, or begin, what is asked; an error is an answer too."""
        action = content.get(wire.ACTION)
        known = self._known.get(str(action))
        if known is None:
            return _refused(f"This kernel's nnsight-lab {nnsight_lab.__version__} does not know {action!r}.")
        try:
            return known(content)
        except LabError as error:
            return _refused(str(error))
        except Exception as error:
            return _refused(f"{type(error).__name__}: {error}")

    # -- engines -------------------------------------------------------------------------------

    def _read(self, content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        model = str(content.get("model", "")).strip()
        if not model:
            raise CellUsageError("A model is needed: demo, a Hugging Face id, or a path.")
        command = read_engine(f"start {_quoted(model)} {content.get('options', '')}")
        assert isinstance(command, StartEngine)
        if command.restart:
            raise CellUsageError("--restart has its own button.")
        options = {name: evaluate(source, dict(self._namespace)) for name, source in command.options.items()}
        for name, value in options.items():
            if value == "":
                raise CellUsageError(f"{name}= has no value yet.")
        return model, options

    def _check(self, content: Mapping[str, Any]) -> Answer:
        """Whether a start would be taken: said while the form is typed in, so nothing is imported for it."""
        model, options = self._read(content)
        models = sys.modules.get("nnsight_lab.engine.models")
        own = ("name", "mode", "keep", "idle_minutes")
        plain = {name: value for name, value in options.items() if name not in own}
        EngineConfig.of(model, options.get("mode", "auto"), plain)
        names = served_option_names() if options.get("keep") else option_names()
        if names:
            refuse_unknown(plain, {*names, *OWN_OPTIONS})
        if models is not None and (Path(model).expanduser().exists() or model.startswith((".", "/", "~"))):
            models.resolve(model, dummy=plain.get("load_format") == "dummy")
        return {"ok": True}

    def _forecast(self, content: Mapping[str, Any]) -> Answer:
        found = self._forecasts.of(str(content.get(wire.CELL, "")))
        return {"ok": True, wire.FORECAST: None if found is None else asdict(found)}

    def _start(self, content: Mapping[str, Any]) -> Answer:
        model, options = self._read(content)
        name = str(options.pop("name", "main"))
        options.setdefault("mode", "async")

        def start() -> str:
            engine = nnsight_lab.start(model, name=name, **options)
            self._bind(engine)
            return "It already ran." if engine.already_running else "Ready."

        return self._begin(wire.START, name, start)

    def _restart(self, content: Mapping[str, Any]) -> Answer:
        engine = _engine(content)

        def restart() -> str:
            self._bind(nnsight_lab.restart(engine.name))
            return "Ready."

        return self._begin(wire.RESTART, engine.name, restart)

    def _stop(self, content: Mapping[str, Any]) -> Answer:
        engine = _engine(content)
        if engine.state()[0] == wire.STARTING:
            engine.give_up()
            return {"ok": True, "text": "The start is given up."}
        if engine.attach_line():  # as its button says: others may use it, and a kept one is stopped as such
            return self._begin(wire.STOP, engine.name, lambda: self._detach(engine.name))
        return self._begin(wire.STOP, engine.name, lambda: str(nnsight_lab.stop(engine.name)))

    def _detach(self, name: str) -> str:
        nnsight_lab.detach(name)
        return "It goes on for others."

    def _interrupt(self, content: Mapping[str, Any]) -> Answer:
        count = _engine(content).abort_all()
        return {"ok": True, "text": f"{count} call{'' if count == 1 else 's'} aborted."}

    def _sleep(self, content: Mapping[str, Any]) -> Answer:
        engine = _engine(content)
        refused = engine.no_sleep()
        if refused:
            return _refused(refused)

        def sleep() -> str:
            engine.sleep()
            return "It sleeps; the next request wakes it."

        return self._begin(wire.SLEEP, engine.name, sleep)

    def _wake(self, content: Mapping[str, Any]) -> Answer:
        engine = _engine(content)

        def wake() -> str:
            engine.wake()
            return "It is awake."

        return self._begin(wire.WAKE, engine.name, wake)

    def _log(self, content: Mapping[str, Any]) -> Answer:
        log = _engine(content).log
        return {"ok": True, "text": log.tail(_LOG_LINES), "path": str(log.path)}

    def _end_orphan(self, content: Mapping[str, Any]) -> Answer:
        engine = str(content.get("engine", ""))

        def end() -> str:
            # Looked up anew: only what is this user's, carries the mark, and whose kernel is gone.
            pids, left = processes.end_orphan(engine)
            if left:
                raise LabError(f"Processes {', '.join(map(str, left))} would not end.")
            return f"{len(pids)} process{'' if len(pids) == 1 else 'es'} ended."

        return self._begin(wire.END_ORPHAN, engine, end)

    def _bind(self, engine: Any) -> None:
        self._namespace.update({"engine": engine, "model": engine.model})

    # -- edits ---------------------------------------------------------------------------------

    def _edit_on(self, content: Mapping[str, Any]) -> Answer:
        self._edit(content).switch_on()
        return {"ok": True}

    def _edit_off(self, content: Mapping[str, Any]) -> Answer:
        self._edit(content).switch_off()
        return {"ok": True}

    def _edit_clear(self, content: Mapping[str, Any]) -> Answer:
        edit = self._edit(content)

        def clear() -> str:
            edit.clear()
            return f"Edit {edit.name} is cleared."

        return self._begin(wire.EDIT_CLEAR, edit.engine.name, clear)

    def _edit_default(self, content: Mapping[str, Any]) -> Answer:
        engine = _engine(content)
        engine.default_edits = content.get(wire.EDITS)
        missing = engine.edits.missing()
        if not missing:
            return {"ok": True}
        return {
            "ok": True,
            "text": f"Requests are refused until this edit is installed: {', '.join(missing)}.",
        }

    def _edit(self, content: Mapping[str, Any]) -> Any:
        return _engine(content).edits[str(content.get("edit", ""))]

    # -- what takes long -----------------------------------------------------------------------

    def _begin(self, action: str, engine: str, work: Callable[[], str]) -> Answer:
        number = next(self._ids)
        self._note(wire.PanelAction(number, action, engine, wire.RUNNING, ""))

        def run() -> None:
            try:
                state, text = wire.DONE, work()
            except LabError as error:
                state, text = wire.FAILED, str(error)
            except BaseException as error:  # told in the panel: nobody else waits for it
                state, text = wire.FAILED, f"{type(error).__name__}: {error}"
            self._surroundings.forget()
            self._note(wire.PanelAction(number, action, engine, state, text))

        threading.Thread(target=run, daemon=True, name=f"nnsight-lab-{action}").start()
        return {"ok": True, "id": number}

    def _note(self, action: wire.PanelAction) -> None:
        with self._lock:
            for index, known in enumerate(self._latest):
                if known.id == action.id:
                    self._latest[index] = action
                    return
            self._latest.append(action)


def _engine(content: Mapping[str, Any]) -> Engine:
    """The engine that is named; else the current one, or the one whose first start is under way."""
    name = str(content["engine"]) if content.get("engine") else None
    if name is None and snapshot.current_name() is None:
        name = next(iter(nnsight_lab.engines()), None)
    return nnsight_lab.get_engine(name)


def _refused(text: str) -> Answer:
    return {"ok": False, "text": text}


def _quoted(model: str) -> str:
    return repr(model) if any(letter in model for letter in " \t$={}'\"") else model

"""What a kernel's engines, edits and saves are, as plain records: taken at any moment, from any thread.

It costs well under a millisecond, and takes no lock that a request holds for long: counters and dictionaries
of this process are read as they are. Only the saves' labels may take a moment, since a request that nobody
looked at yet is taken apart for them; so they come when they are asked for, and of the newest few requests.
"""

from __future__ import annotations

import getpass
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

import nnsight_lab
from nnsight_lab.engine.step_words import NO_GRAPHS_ON_CPU, plain
from nnsight_lab.errors import SavesError
from nnsight_lab.panel.known_models import known_models
from nnsight_lab.panel.surroundings import Device, Held, Surroundings
from nnsight_lab.wire import panel as wire
from nnsight_lab.wire.step_figures import StepFigures

if TYPE_CHECKING:
    from nnsight_lab.engine.edits import Edit
    from nnsight_lab.engine.local import Engine
    from nnsight_lab.saves.label import SaveLabel

#: Of how many requests the saves are told, and how many of each.
REQUESTS = 20
SAVES_EACH = 40
_PROMPT = 80
#: Of the reasons why steps ran module by module, so many are told.
_REASONS = 3
#: How often models to choose from are looked up.
_MODELS_S = 10.0
#: Tokens are counted over at least this long.
_SPAN_S = 1.0


class Snapshots:
    """Takes snapshots; keeps the counts of the one before, for rates."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[float, int, float]] = {}
        self._owner = _user()
        self._models: list[str] = []
        self._models_read = float("-inf")

    def take(self, actions: list[wire.PanelAction], *, saves: bool = False) -> wire.PanelStatus:
        """Everything as it stands.

        Args:
            actions: What was asked for lately.
            saves: Whether the newest requests' saves are wanted.
        """
        engines = nnsight_lab.engines()
        look = self._surroundings.latest()
        current = current_name()
        names = {engine.id: name for name, engine in engines.items()}
        return wire.PanelStatus(
            protocol=wire.PROTOCOL,
            version=nnsight_lab.__version__,
            pid=os.getpid(),
            importing_s=_importing_s(),
            gpus=look.gpus,
            devices=[_gpu(device, names) for device in look.devices],
            engines=[
                self._engine(engine, look.engines.get(engine.id, Held()), name == current)
                for name, engine in engines.items()
            ],
            orphans=[
                wire.PanelOrphan(engine, list(held.pids), held.memory_bytes, held.gpu_bytes, held.log)
                for engine, held in look.engines.items()
                if held.orphaned and engine not in names
            ],
            actions=actions,
            models=self._known_models(),
            with_saves=saves,
            saves=[save for name in engines for save in _saves(engines[name], name == current)]
            if saves
            else [],
        )

    def saves_changes(self) -> tuple[tuple[str, int], ...]:
        """Differs from another answer where saves came or went in between."""
        return tuple((engine.id, engine.saves.changes) for engine in nnsight_lab.engines().values())

    def _known_models(self) -> list[str]:
        # A cache directory may be far away, on a network.
        if time.monotonic() - self._models_read > _MODELS_S:
            self._models, self._models_read = known_models(), time.monotonic()
        return self._models

    def _engine(self, engine: Engine, held: Held, current: bool) -> wire.PanelEngine:
        state, cause = engine.state()
        flight = engine.flight()
        blocks = engine.kv_blocks()
        starting = state == wire.STARTING
        return wire.PanelEngine(
            name=engine.name,
            state=state,
            current=current,
            model=engine.config.model,
            mode=engine.mode,
            phase=engine.progress.phase if starting else "",
            phase_s=engine.progress.elapsed_s if starting else 0.0,
            options=[f"{name}={value!r}" for name, value in engine.shown_options()],
            waiting=flight.waiting,
            running=flight.running,
            tokens_per_s=self._rate(engine.id, flight.tokens),
            kv_used=min(1.0, flight.blocks / blocks) if blocks else -1.0,
            saves_bytes=engine.saves.bytes_in_memory,
            saves_disk_bytes=engine.saves.bytes_on_disk,
            saves_budget_bytes=engine.saves.budget_bytes,
            saves_requests=len(engine.saves),
            up_s=engine.up_s(),
            idle_s=engine.idle_s(),
            pids=list(held.pids),
            memory_bytes=held.memory_bytes,
            gpu_bytes=held.gpu_bytes,
            log=str(engine.log.path),
            cause=cause,
            no_sleep=engine.no_sleep(),
            attach=engine.attach_line(),
            chooses_edits=engine.edits.default is not None,
            default_edits=list(engine.edits.default or ()),
            edits=[self._edit(edit) for edit in engine.edits],
            steps=_steps(engine),
        )

    def _edit(self, edit: Edit) -> wire.PanelEdit:
        return wire.PanelEdit(
            name=edit.name,
            version=edit.version,
            on=edit.engine.edits.by_default(edit),
            source=edit.source,
            previous_source=edit.previous_source,
            cell_id=edit.cell.id,
            cell_source=edit.cell.source,
            owner=self._owner,
            hits=edit.hits,
            errors=edit.errors,
            last_error=edit.last_error,
        )

    def _rate(self, engine_id: str, tokens: int) -> float:
        """Tokens a second since the count before; several askers share one count."""
        now = time.monotonic()
        with self._lock:
            then, before, rate = self._tokens.get(engine_id, (now, tokens, 0.0))
            if now - then >= _SPAN_S or engine_id not in self._tokens:
                if now > then:
                    rate = max(0, tokens - before) / (now - then)
                self._tokens[engine_id] = (now, tokens, rate)
            return rate


def _steps(engine: Engine) -> wire.PanelSteps:
    figures = engine.steps()
    known = figures or StepFigures()
    return wire.PanelSteps(
        known=figures is not None,
        graphs=known.graphs,
        on_cpu=engine.no_graphs() == NO_GRAPHS_ON_CPU,
        replayed=known.replayed,
        tapped=known.tapped,
        by_module=known.eager,
        reasons=[
            wire.PanelReason(plain(why), asker, steps) for why, asker, steps in known.reasons[:_REASONS]
        ],
    )


def _gpu(device: Device, names: Mapping[str, str]) -> wire.PanelGpu:
    return wire.PanelGpu(
        index=device.gpu.index,
        name=device.gpu.name,
        used_bytes=device.gpu.used_bytes,
        total_bytes=device.gpu.total_bytes,
        processes=[
            wire.PanelGpuProcess(
                pid=tenant.pid,
                owner=tenant.owner,
                bytes=tenant.nbytes or -1,
                ours=tenant.engine != "",
                engine=names.get(tenant.engine, ""),
            )
            for tenant in sorted(device.tenants, key=lambda tenant: -tenant.nbytes)
        ],
    )


def _saves(engine: Engine, current: bool) -> Iterator[wire.PanelSave]:
    store = engine.saves
    how = "lab.saves()" if current else f"lab.saves({engine.name!r})"
    for request_id in store.ids()[:REQUESTS]:
        try:
            labels = store.labels(request_id)
        except SavesError:  # it went meanwhile
            continue
        for label in islice(labels, SAVES_EACH):
            yield wire.PanelSave(
                engine=engine.name,
                request_id=request_id,
                block=label.block,
                name=label.name,
                step=-1 if label.step is None else label.step,
                kind=label.kind,
                shape=list(label.shape),
                dtype=label.dtype,
                bytes=label.bytes,
                prompt=label.prompt[:_PROMPT],
                created=label.created,
                code=_code(how, label),
            )


def _code(how: str, label: SaveLabel) -> str:
    more = "" if label.sequence == 0 else f", sequence={label.sequence}"
    return f"{how}.get({label.request_id!r}, {label.name!r}, {label.block!r}{more}){label.path}"


def current_name() -> str | None:
    """The current engine's name; importing nothing."""
    manager = sys.modules.get("nnsight_lab.engine.manager")
    found: str | None = None if manager is None else manager.manager.current
    return found


def _importing_s() -> float:
    importing = sys.modules.get("nnsight_lab.engine.importing")
    return 0.0 if importing is None else importing.under_way_s() or 0.0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())

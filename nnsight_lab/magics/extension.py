"""`%load_ext nnsight_lab`: hooks everything of this room into a shell, and takes all of it out again.

Two transformers are hooked in, for one reason: IPython asks "is this cell complete?" with the same
transformers that it runs cells with, and passes over those marked `has_side_effects`. The strict one is so
marked, and stands first: when a cell runs, it transforms or refuses. The lenient one sees a cell only when
it is still being typed. A `CellUsageError` raised by the strict one shows as one line, since IPython asks an
error for its own `_render_traceback_` (a `SyntaxError` would show four lines, and `is_complete` would call
the half-written cell invalid).
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nnsight_lab.errors import BlockError
from nnsight_lab.magics import stubs
from nnsight_lab.magics.cells import HIDDEN_NAME, Cells
from nnsight_lab.magics.completion import CellMatcher, LineMatcher
from nnsight_lab.magics.contract import current_mode
from nnsight_lab.magics.inspection import Inspection
from nnsight_lab.magics.lines import LineMagics
from nnsight_lab.magics.looking import bundle_of
from nnsight_lab.magics.transform import sketch, transform

#: Where a shell keeps its extension, so that loading twice is harmless.
_ATTRIBUTE = "_nnsight_lab_extension"
#: ipykernel names every cell's file after this variable if it is set, so that all cells share one name.
_CELL_NAME_VARIABLE = "IPYKERNEL_CELL_NAME"


#: Whose rich form this is: by name, since its module loads torch.
_STORE = ("nnsight_lab.saves.store", "SavesStore")


class Extension:
    """Everything that one shell has been given."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._cells = Cells(shell)
        self._strict = _Strict(shell)
        self._lenient = _Lenient(shell)
        self._matchers = [CellMatcher(shell).matcher, LineMatcher(shell).matcher]
        self._inspection = Inspection(shell)
        self._replaced: dict[tuple[str, str], Any] = {}
        self._shared_cell_name = bool(os.environ.get(_CELL_NAME_VARIABLE))

    def load(self) -> None:
        """Hooks everything in."""
        shell = self._shell
        shell.input_transformers_cleanup.extend((self._strict, self._lenient))
        lines = LineMagics(shell, self._cells.saved)
        self._register("line", "engine", lines.engine)
        self._register("line", "edits", lines.edits)
        self._register("line", "saves", lines.saves)
        self._register("cell", "trace", stubs.trace)
        self._register("cell", "edit", stubs.edit)
        shell.Completer.custom_matchers.extend(self._matchers)
        self._inspection.load()
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        self._located = BlockError.locate
        BlockError.locate = staticmethod(self._locate)
        self._formatter.for_type_by_name(*_STORE, lambda store: bundle_of(store, shell.user_ns))
        self._hide()
        if self._shared_cell_name:
            warnings.warn(
                f"{_CELL_NAME_VARIABLE} is set, so every cell has the same file name, and nnsight would "
                "run the block of another cell. Its caches are cleared before each cell; unset the variable.",
                RuntimeWarning,
                stacklevel=3,
            )

    def unload(self) -> None:
        """Takes everything out."""
        shell = self._shell
        for transformer in (self._strict, self._lenient):
            shell.input_transformers_cleanup.remove(transformer)
        for matcher in self._matchers:
            shell.Completer.custom_matchers.remove(matcher)
        self._inspection.unload()
        shell.events.unregister("pre_run_cell", self._before_cell)
        shell.events.unregister("post_run_cell", self._after_cell)
        for (kind, name), before in self._replaced.items():
            if before is None:
                shell.magics_manager.magics[kind].pop(name, None)
            else:
                shell.magics_manager.magics[kind][name] = before
        BlockError.locate = staticmethod(self._located)
        self._forget_store()
        self._cells.saved.close()
        shell.user_ns.pop(HIDDEN_NAME, None)
        shell.user_ns_hidden.pop(HIDDEN_NAME, None)

    @property
    def _formatter(self) -> Any:
        formatter: Any = self._shell.display_formatter
        return formatter.mimebundle_formatter

    def _forget_store(self) -> None:
        # `pop` looks only where a type is that was not seen yet; once it was, it is among the others.
        self._formatter.deferred_printers.pop(_STORE, None)
        for kind in [kind for kind in self._formatter.type_printers if _named(kind) == _STORE]:
            del self._formatter.type_printers[kind]

    def _register(self, kind: str, name: str, function: Any) -> None:
        self._replaced[kind, name] = self._shell.magics_manager.magics[kind].get(name)
        self._shell.register_magic_function(function, kind, name)

    def _hide(self) -> None:
        """Puts `__lab__` in the namespace, where `%who` does not list it; `%reset` takes it out."""
        self._shell.user_ns[HIDDEN_NAME] = self._cells
        self._shell.user_ns_hidden[HIDDEN_NAME] = self._cells

    def _locate(self, filename: str) -> tuple[str, list[str]]:
        """A cell by its number and as it was typed, for the errors of blocks; other files as they are."""
        named = self._shell.compile.format_code_name(filename)
        if named is None:
            return self._located(filename)
        place = " ".join(named)
        number = re.search(r"\d+", named[1])
        typed = self._shell.history_manager.input_hist_raw if self._shell.history_manager else []
        if number is None or int(number[0]) >= len(typed):
            return place, self._located(filename)[1]
        return place, typed[int(number[0])].splitlines()

    def _before_cell(self, *_: Any) -> None:
        if self._shell.user_ns.get(HIDDEN_NAME) is not self._cells:
            self._hide()
        if self._shared_cell_name:
            _clear_block_caches()

    def _after_cell(self, *_: Any) -> None:
        self._cells.finish()
        self._cells.show_saved()


class _Strict:
    """The transformer of cells that run."""

    has_side_effects = True  # passed over by is_complete, which is all that IPython makes of it

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def __call__(self, lines: list[str]) -> list[str]:
        return transform(lines, use_async=_use_async(self._shell))


class _Lenient:
    """The transformer of cells that are still being typed."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def __call__(self, lines: list[str]) -> list[str]:
        return sketch(lines, use_async=_use_async(self._shell))


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%load_ext`; a second call does nothing."""
    if getattr(shell, _ATTRIBUTE, None) is None:
        extension = Extension(shell)
        extension.load()
        setattr(shell, _ATTRIBUTE, extension)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Called by `%unload_ext`; without an earlier load it does nothing."""
    extension: Extension | None = getattr(shell, _ATTRIBUTE, None)
    if extension is not None:
        setattr(shell, _ATTRIBUTE, None)
        extension.unload()


def _named(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__name__


def _use_async(shell: InteractiveShell) -> bool:
    """By the engine's mode, not by a running loop: ipykernel runs one in every cell, the terminal in none."""
    return bool(shell.autoawait) and current_mode() == "async"


def _clear_block_caches() -> None:
    """Makes nnsight read every block anew.

    `nnsight.tracing.globals.SOURCES` and `BLOCKS` are keyed by file name and line, and never revalidated
    (nnsight 0.8).
    """
    caches = sys.modules.get("nnsight.tracing.globals")
    for name in ("SOURCES", "BLOCKS"):
        cache = getattr(caches, name, None)
        if cache is not None:
            cache.clear()

"""What a notebook shows of saves unasked: a line below a `%%trace` cell, and `engine.saves` as a value.

Both are widgets with a table for where no widget runs. A script and a terminal show neither: there a name is
bound, and that is all. What fails here is logged and costs the cell nothing, since its values are there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_lab.errors import CellUsageError, LabError
from nnsight_lab.magics.contract import Engine, lab
from nnsight_lab.magics.drawing import in_notebook, show_bundle

if TYPE_CHECKING:
    from nnsight_lab.widgets.browser import SavesBrowser
    from nnsight_lab.widgets.cell_saves import Strips

logger = logging.getLogger("nnsight_lab.magics")

#: What the browser that was opened last is bound to, unless that name is somebody's own.
NAME = "browser"
#: What `show=` of a cell may be.
SHOWS = (True, False, "tokens", "saves")

_Bundle = tuple[dict[str, Any], dict[str, Any]]


class CellViews:
    """The lines below cells.

    Args:
        namespace: The user's.

    Attributes:
        on: Whether cells that do not say so show theirs.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.on = True
        self._namespace = namespace
        self._strips: Strips | None = None
        self._warm = False

    def warm(self, cell: str) -> None:
        """Import what is shown later, while the cell's requests run: a third of a second, once."""
        if cell and not self._warm and in_notebook():
            self._warm = True
            threading.Thread(target=_import_widgets, name="nnsight-lab import", daemon=True).start()

    def show(self, engine: Engine, requests: Sequence[str], cell: str = "") -> None:
        """The line of one cell, where its requests saved anything.

        Args:
            engine: Ran it.
            requests: Their ids.
            cell: Its own id, which front ends say that people sit at; without one only the table is shown.
        """
        if not in_notebook():
            return
        store: Any = engine.saves
        kept = [request for request in requests if request in store]
        if not kept:
            return
        if not cell:
            from nnsight_lab.saves.said import said_of, table_of  # torch

            # nbconvert and its like: nobody can click there, and each widget would stay in the file.
            show_bundle({"text/plain": said_of(store, kept).line(), "text/html": table_of(store, kept)}, {})
            return
        try:
            from nnsight_lab.widgets.cell_saves import CellSaves, Strips  # torch and anywidget

            strip = CellSaves(
                store,
                kept,
                name=called(engine, self._namespace),
                tokens=_tokens_of(engine),
                opened=lambda browser: bind(browser, self._namespace),
            )
            bundle = strip._repr_mimebundle_()
            if self._strips is None:
                self._strips = Strips()
            self._strips.add(strip, cell)
        except (ImportError, LabError) as error:  # not installed, not built, another store
            logger.warning("what the cell saved is not shown: %s", error)
            return
        if bundle is not None:
            show_bundle(*bundle)

    def close(self) -> None:
        """Close all of them."""
        if self._strips is not None:
            self._strips.close()


def shown_parts(show: Any) -> tuple[bool, bool | None]:
    """Whether a cell shows its tokens, and its saves: None where the default decides.

    Raises:
        CellUsageError: ``show`` is none of `SHOWS`.
    """
    if not any(show is known or (isinstance(show, str) and show == known) for known in SHOWS):
        raise CellUsageError(
            f'show={show!r} is not understood. Write show=False (nothing), show="tokens", show="saves" or '
            "show=True (both)."
        )
    if show is True:
        return True, None
    return show == "tokens", show == "saves"


def browser_of(engine: Engine, namespace: dict[str, Any]) -> SavesBrowser | None:
    """A browser of an engine's saves, bound to `NAME`; None where there is nothing to browse with."""
    try:
        from nnsight_lab.widgets.browser import SavesBrowser  # torch and anywidget, for this alone

        store: Any = engine.saves  # another kind of store is refused there
        browser = SavesBrowser(store, name=called(engine, namespace), tokens=_tokens_of(engine))
    except (ImportError, LabError):  # not installed, not built, or another store
        return None
    bind(browser, namespace)
    return browser


def bundle_of(store: Any, namespace: dict[str, Any]) -> _Bundle | None:
    """``engine.saves`` as the value of a cell: the browser; None where the store's own forms must do."""
    if not in_notebook() or not len(store):
        return None
    engine = next((one for one in lab().engines().values() if one.saves is store), None)
    if engine is None:
        return None  # SavesBrowser(store) knows no name for a store of somebody's own, but they do
    browser = browser_of(engine, namespace)
    bundle = browser._repr_mimebundle_() if browser is not None else None
    if bundle is None:
        return None
    rows, metadata = bundle
    return {**rows, "text/html": store._repr_html_(), "text/plain": repr(store)}, metadata


def called(engine: Engine, namespace: dict[str, Any]) -> str:
    """What the store is called in code to copy."""
    return "engine.saves" if namespace.get("engine") is engine else f"lab.saves({engine.name!r})"


def bind(browser: SavesBrowser, namespace: dict[str, Any]) -> None:
    """Bind the browser, so that `browser.selected` is the save that is opened; never over another value."""
    known = namespace.get(NAME)
    if known is None or type(known) is type(browser):
        namespace[NAME] = browser
        browser.bound = NAME


def cell_id(shell: Any) -> str:
    """The id of the cell that runs, as JupyterLab and VS Code say it; "" elsewhere."""
    try:
        parent = shell.kernel.get_parent("shell")
        return str(parent.get("metadata", {}).get("cellId") or "")
    except Exception:  # a kernel without it
        return ""


def _tokens_of(engine: Engine) -> Callable[..., Any]:
    from nnsight_lab.widgets.prompt_tokens import PromptTokens  # torch

    return PromptTokens(engine)


def _import_widgets() -> None:
    try:
        import nnsight_lab.widgets.cell_saves  # noqa: F401
    except Exception:  # said where it is shown
        logger.debug("widgets cannot be imported", exc_info=True)

"""What a `%saves` line does: shows, writes and finds what requests saved.

Files outlive kernels, so all that has to do with files works without an engine, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnsight_lab.errors import CellUsageError, nearest
from nnsight_lab.magics.arguments import evaluate
from nnsight_lab.magics.commands import ListSaves, MarkSaves, ReadSaves, SavesCommand, ShowSaves, WriteSaves
from nnsight_lab.magics.contract import Engine, Saves, chosen_engine, lab
from nnsight_lab.magics.drawing import Drawing, in_notebook, sentence, show, show_bundle, table
from nnsight_lab.magics.looking import CellViews, browser_of
from nnsight_lab.wire.sizes import shown_bytes

_HEADS = ("request", "block", "name", "shape", "dtype", "size", "prompt", "age")
_FILE_HEADS = ("file", "requests", "saves", "size", "model", "age")
#: How many files stand below the saves in memory; `%saves files` shows all.
_FILES = 10


def run_saves(command: SavesCommand, namespace: dict[str, Any], views: CellViews) -> Any:
    """Does what a line says, and shows it.

    Returns:
        The file that was read; None for every other line.

    Raises:
        CellUsageError: A request that it names is not there, or more than one is.
    """

    def text(source: str) -> str:
        value = evaluate(source, namespace)
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)

    if isinstance(command, ShowSaves):
        views.on = command.on
        below = "say below them what they saved" if command.on else "show nothing of what they saved"
        show(sentence(f"%%trace cells {below}."))
        return None
    name = None if command.engine is None else text(command.engine)
    if isinstance(command, ListSaves):
        _list(command, name, namespace)
    elif isinstance(command, ReadSaves):
        return _read(text(command.path), name)
    elif isinstance(command, WriteSaves):
        engine = chosen_engine(name)
        saves = engine.saves
        if not len(saves):
            raise CellUsageError(f"There is nothing to write: engine {engine.name} keeps no saves.")
        requests = [found for source in command.requests for found in _requests(saves, text(source))]
        written = _written(saves, text(command.path), requests or None)
        count = len(requests) if requests else len(saves)
        show(sentence(f"Wrote {_counted(count, 'request')} to {written}"))
    else:
        _mark(command, chosen_engine(name), [text(source) for source in command.requests])
    return None


def _list(command: ListSaves, name: str | None, namespace: dict[str, Any]) -> None:
    drawings: list[Drawing] = []
    engine = chosen_engine(name) if name is not None or (lab().engines() and not command.files_only) else None
    if engine is not None and (command.table_only or not _browse(engine, namespace)):
        drawings.append(saves_table(engine))
    files = files_table(None if command.files_only else _FILES)
    if files is not None:
        drawings.append(files)
    elif engine is None:
        drawings.append(
            sentence("No files of saves were found. %saves write PATH writes those of an engine's requests.")
        )
    for drawing in drawings:
        show(drawing)


def _browse(engine: Engine, namespace: dict[str, Any]) -> bool:
    """Shows the saves browser, with the table where no widget runs; whether it could."""
    if not in_notebook() or not len(engine.saves):
        return False
    browser = browser_of(engine, namespace)
    bundle = browser._repr_mimebundle_() if browser is not None else None
    if bundle is None:
        return False
    show_bundle({**bundle[0], **saves_table(engine).bundle()}, bundle[1])
    return True


def _read(path: str, name: str | None) -> Any:
    path = str(Path(path).expanduser())
    file = lab().read(path)
    count = _counted(len(file.requests), "request")
    if name is None and not lab().engines():
        show(
            sentence(f"{file.path.name} has {count}. Bind it: f = %saves read {path}, or lab.read({path!r})")
        )
        return file
    engine = chosen_engine(name)
    engine.saves.adopt(file)
    show(sentence(f"Took {count} from {file.path.name} into engine {engine.name}: engine.saves, %saves"))
    return file


def _written(saves: Saves, path: str, requests: Sequence[str] | None) -> object:
    try:
        return saves.write(str(Path(path).expanduser()), requests)
    except OSError as error:
        raise CellUsageError(f"{path} cannot be written: {error.strerror or error}.") from None


def _mark(command: MarkSaves, engine: Engine, requests: Sequence[str]) -> None:
    saves = engine.saves
    if not requests:
        count = len(saves)
        saves.clear()
        show(sentence(f"Dropped {_counted(count, 'request')} of engine {engine.name}."))
        return
    found = [each for request in requests for each in _requests(saves, request)]  # all, before any is touched
    for request in found:
        if command.action == "keep":
            saves.keep(request)
        else:
            saves.drop(request)
    done = "kept" if command.action == "keep" else "dropped"
    show(sentence(f"{', '.join(found)}: {done}"))


def _requests(saves: Saves, said: str) -> list[str]:
    """The request of that id, or the only one whose id begins so."""
    ids = saves.ids()
    if said in ids:
        return [said]
    begun = [known for known in ids if known.startswith(said)]
    if len(begun) == 1:
        return begun
    if begun:
        raise CellUsageError(f"{len(begun)} requests begin with {said!r}: write more of the id.")
    raise CellUsageError(f"Nothing is kept of request {said!r}.{nearest(said, ids[:100])} %saves lists them.")


def saves_table(engine: Engine) -> Drawing:
    """The newest saved values of an engine, one a row."""
    rows, more = engine.saves.rows()
    if not rows:
        return sentence(
            f"Engine {engine.name} keeps no saves. A %%trace cell whose block has x.save() brings some."
        )
    drawn = table(_HEADS, rows)
    rest = sentence(f"{f'and {more}; ' if more else ''}{repr(engine.saves).strip('<>')}")
    return Drawing(drawn.html + rest.html, f"{drawn.text}\n{rest.text}")


def files_table(most: int | None = None) -> Drawing | None:
    """The files of saves that were found, one a row; None where there are none."""
    from nnsight_lab.saves import written  # torch, seconds to import, and only this line needs it
    from nnsight_lab.saves.table import age

    found = written.found(most=written.MOST if most is None else most)
    if not found:
        return None
    rows: list[tuple[object, ...]] = []
    for path, file, refused in found:
        if file is None:
            reason = refused.removeprefix(f"{path}: ").removeprefix(f"{path.with_suffix('.json')}: ")
            rows.append((_short(path), "", f"refused: {reason}", "", "", ""))
            continue
        saves = {label.key[:4] for label in file.labels}
        models = sorted({label.model for label in file.labels if label.model})
        created = max((label.created for label in file.labels), default=0.0)
        rows.append(
            (
                _short(path),
                len(file.requests),
                len(saves),
                shown_bytes(file.nbytes),
                ", ".join(models),
                age(created),
            )
        )
    return table(_FILE_HEADS, rows)


def _short(path: Path) -> str:
    """A path as one would type it here."""
    try:
        return str(path.relative_to(Path.cwd())) if path.is_absolute() else str(path)
    except (ValueError, OSError):
        return str(path)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

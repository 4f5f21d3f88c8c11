"""What tests of views in a real JupyterLab share: a folder, a page, and what the browser complained about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import Notebook, empty_notebook, open_page, serve

Opened = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def problems() -> list[str]:
    """What the browser complained about."""
    return []


@pytest.fixture(scope="module")
def opened(folder: Path, chromium: str, problems: list[str]) -> Opened:
    """Opens an empty notebook in JupyterLab, with a kernel that is ready, and yields the page."""

    @contextmanager
    def open_notebook(name: str, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
        notebook = empty_notebook(folder / name)
        with (
            serve(folder, notebook, environment) as server,
            open_page(server, notebook.name, chromium) as page,
        ):
            page.on("pageerror", lambda error: problems.append(f"{error}: {error.stack}"))
            Notebook(page).finish(60)
            yield page

    return open_notebook


@pytest.fixture
def notebook(page: Any, problems: list[str]) -> Iterator[Notebook]:
    problems.clear()
    book = Notebook(page)
    yield book
    assert book.errors() == []
    assert problems == []

"""A mock comm: what a widget sends, and a way to speak to it as a page does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comm
from comm.base_comm import BaseComm
from ipywidgets.widgets import widget as ipywidgets_widget

from nnsight_lab.widgets import kinds
from tests.waiting import until

_IDS = itertools.count()


class MockComm(BaseComm):
    """Keeps every message, and is counted while it is open."""

    open_ones: set[str] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        super().__init__(*args, **kwargs)
        MockComm.open_ones.add(self.comm_id)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        with self.changed:
            self.sent.append({"type": msg_type, "data": data, "buffers": list(buffers or []), **keys})
            self.changed.notify_all()

    def close(self, *args: Any, **kwargs: Any) -> None:
        MockComm.open_ones.discard(self.comm_id)
        super().close(*args, **kwargs)


@contextmanager
def mock_comms() -> Iterator[type[MockComm]]:
    """Widgets made inside have mock comms; none may be left open, and no widget alive."""
    assert not MockComm.open_ones
    before = set(ipywidgets_widget._instances)
    original = comm.create_comm
    comm.create_comm = MockComm
    try:
        yield MockComm
    finally:
        comm.create_comm = original
    left = [one for name, one in ipywidgets_widget._instances.items() if name not in before]
    assert left == [], "a widget was not closed"
    assert not MockComm.open_ones
    until(lambda: not _threads(), 5, "the threads of closed widgets")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nnsight-lab ")]


class Page:
    """Speaks to a widget as one view in a page does."""

    def __init__(self, widget: Any) -> None:
        self.comm: MockComm = widget.comm
        self.view = f"view-{next(_IDS)}"

    def tell(self, kind: str, **content: Any) -> None:
        """Sends a message."""
        data = {"method": "custom", "content": {kinds.KIND: kind, kinds.VIEW: self.view, **content}}
        self.comm.handle_msg({"content": {"comm_id": self.comm.comm_id, "data": data}, "buffers": []})

    def begin(self, kind: str, **content: Any) -> str:
        """Asks, and does not wait."""
        question = f"{self.view}:{next(_IDS)}"
        self.tell(kind, **{kinds.ASK: question}, **content)
        return question

    def answers(self, question: str) -> list[tuple[dict[str, Any], list[bytes]]]:
        """What came so far."""
        return [
            (message["data"]["content"], message["buffers"])
            for message in list(self.comm.sent)
            if message["type"] == "comm_msg"
            and message["data"].get("method") == "custom"
            and message["data"]["content"].get(kinds.ANSWER) == question
        ]

    def finish(self, question: str) -> list[tuple[dict[str, Any], list[bytes]]]:
        """All parts of the answer."""
        until(lambda: any(content[kinds.LAST] for content, _ in self.answers(question)), 30, "the last part")
        return self.answers(question)

    def ask(self, kind: str, **content: Any) -> list[tuple[dict[str, Any], list[bytes]]]:
        """Asks, and waits for all parts of the answer."""
        return self.finish(self.begin(kind, **content))

    def one(self, kind: str, **content: Any) -> dict[str, Any]:
        """Asks what has an answer of one part."""
        ((answer, _),) = self.ask(kind, **content)
        return answer

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nnsight_lab.magics import drawing
from nnsight_lab.magics.drawing import Canvas, Drawing, table
from nnsight_lab.magics.live import LISTED_REQUESTS, TokenView, drawn
from tests.magics.fakes import Progress


class Recorder(Canvas):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Drawing] = []
        self.last: list[Drawing] = []

    def draw(self, drawing: Drawing) -> None:
        self.drawn.append(drawing)

    def finish(self, drawing: Drawing) -> None:
        self.last.append(drawing)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def one(text: str, tokens: int = 1, finished: bool = False, prompt: str = "p") -> Progress:
    return Progress(0, prompt, text, tokens, finished)


def test_large_saves_on_their_way_are_counted_until_they_are_here() -> None:
    one = Progress(0, "Hello", " world", 2, False, home_bytes=3_000_000_000, brought_bytes=1_200_000_000)
    for requests in ([one], [one, Progress(1, "Hi", " there", 2, True)]):
        assert "; saves: 1.2 GB of 3 GB are here" in drawn(requests, 1.0).html
    assert "are here" not in drawn([replace(one, brought_bytes=3_000_000_000)], 1.0).html


def test_at_most_twenty_states_a_second_are_drawn() -> None:
    canvas, clock = Recorder(), Clock()
    view = TokenView(canvas, clock)
    for step in range(1000):
        clock.now_s = step / 1000
        view([one("x" * step, step)])
    assert 18 <= len(canvas.drawn) <= 20
    assert canvas.last == []


def test_the_last_state_is_drawn_however_soon_it_comes_and_once() -> None:
    canvas = Recorder()
    view = TokenView(canvas, Clock())
    view([one("a")])
    view([one("ab", 2)])
    view([one("abc", 3, finished=True)])
    view([one("abc", 3, finished=True)])
    view.finish()
    assert [state.text for state in canvas.last] == ["pabc"]


def test_an_interrupted_view_is_left_with_what_it_saw_last() -> None:
    canvas = Recorder()
    view = TokenView(canvas, Clock())
    view([one("a")])
    view([one("ab", 2)])
    view.finish()
    assert canvas.last[0].text == "pab"


def test_html_is_escaped_and_whitespace_kept() -> None:
    state = drawn([one("<b>\n  x", prompt="a & <i>")], 1.0)
    assert "&lt;b&gt;\n  x" in state.html
    assert "a &amp; &lt;i&gt;" in state.html
    assert "white-space:pre-wrap" in state.html
    assert state.text == "a & <i><b>\n  x"


def test_colours_are_inherited() -> None:
    states = [drawn([one("a")], 1.0), drawn([one("a"), one("b")], 1.0), table(("a",), [("b",)])]
    for state in states:
        assert "color:" not in state.html.replace("--jp-border-color", "")
        assert "background" not in state.html


def test_many_requests_show_counts_speed_and_the_first_few() -> None:
    requests = [Progress(i, f"prompt {i} ", "one\ntwo" * 100, 8, i < 37) for i in range(64)]
    state = drawn(requests, 512 / 210)
    assert state.text.splitlines()[0] == "37 of 64 requests, 512 tokens, 210 tok/s"
    assert len(state.text.splitlines()) == LISTED_REQUESTS + 2
    assert "56 more in `tracer.outputs`" in state.text
    assert '<progress value="37" max="64"' in state.html
    assert "<progress" not in drawn([one("a", finished=True), one("b", finished=True)], 1.0).html


def test_a_state_is_small_whatever_ran() -> None:
    long = drawn([one("é<" * 100_000, prompt="p" * 100_000)], 1.0)
    many = drawn([Progress(i, "p" * 10_000, "t" * 10_000, 9, True) for i in range(10_000)], 1.0)
    assert len(long.html) < 80_000
    assert "of 200,000 characters, `tracer.outputs` has all" in long.html
    assert len(many.html) < 5_000


def test_a_terminal_prints_the_final_text_once(run: Any, lab: Any) -> None:
    lab.start("demo")
    assert run("%%trace 'a prompt', max_tokens=3\nx = 1\n").out == "a prompt tok tok tok\n"
    assert run("%%trace 'a prompt', max_tokens=3, show=False\nx = 1\n").out == ""


def test_the_users_own_watch_takes_the_place_of_the_view(run: Any, lab: Any, shell: Any) -> None:
    lab.start("demo")
    seen: list[Any] = []
    shell.user_ns["seen"] = seen
    assert run("%%trace 'a', watch=seen.append, max_tokens=2\nx = 1\n").out == ""
    assert [requests[0].tokens for requests in seen] == [1, 2]


def test_a_notebook_gets_one_output_that_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    updates: list[dict[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            updates.append(bundle)

    def display(bundle: dict[str, str], **_: Any) -> Handle:
        shown.append(bundle)
        return Handle()

    monkeypatch.setattr(drawing, "in_notebook", lambda: True)
    monkeypatch.setattr(drawing, "_display", display)
    canvas = Canvas()
    first, second = Drawing("<p>1</p>", "1"), Drawing("<p>2</p>", "2")
    for state in (first, first, second):
        canvas.draw(state)
    canvas.finish(second)
    assert shown == [{"text/html": "<p>1</p>", "text/plain": "1"}]
    assert updates == [{"text/html": "<p>2</p>", "text/plain": "2"}]

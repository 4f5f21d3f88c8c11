"""A long look has a bar under its cell, a short one has nothing."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_lab.magics import progress
from nnsight_lab.magics.progress import shown


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was drawn; time goes one second at each look at it."""
    texts: list[str] = []
    clock = iter(range(1000))

    class Canvas:
        def draw(self, drawing: Any) -> None:
            texts.append(drawing.text)

        finish = draw

    monkeypatch.setattr(progress, "Canvas", Canvas)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    return texts


def test_a_short_look_shows_nothing(drawn: list[str]) -> None:
    with shown("Logit lens", {"top_k": 3}) as options:
        assert options["top_k"] == 3
        options["progress"](1.0)
    assert drawn == []


def test_a_long_look_shows_its_share_and_leaves_one_line(drawn: list[str]) -> None:
    with shown("Logit lens", {}) as options:
        for share in (0.1, 0.5, 1.0):
            options["progress"](share)
    assert drawn == [
        "Logit lens: 50%, about 2 s left",
        "Logit lens: 100%, about 0 s left",
        "Logit lens: took 4 s.",
    ]


def test_an_interrupted_look_says_how_far_it_came(drawn: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), shown("Attention", {}) as options:
        for share in (0.1, 0.2, 0.3):
            options["progress"](share)
        raise KeyboardInterrupt
    assert drawn[-1] == "Attention: ended at 30%, after 4 s."

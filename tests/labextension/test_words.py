"""The extension's words can be found by who translates them."""

from __future__ import annotations

import re

from tests.labextension.pseudo import calls, pseudo, words


def test_every_text_for_the_translator_is_written_out_where_it_is_asked() -> None:
    # A text that is put together first is in no catalogue.
    unreadable = [call for call in calls() if not re.match(r"trans\.(__|_n)\(\s*'", call)]
    assert unreadable == []
    assert len(words()) > 80


def test_a_translation_can_put_its_parts_in_another_order() -> None:
    for forms in words():
        for form in forms:
            numbers = [int(number) for number in re.findall(r"%(\d)", form)]
            assert sorted(numbers) == list(range(1, len(numbers) + 1)), form


def test_the_pseudo_language_leaves_no_letter_and_every_place() -> None:
    assert pseudo("Engine %1: %2") == "Ｅｎｇｉｎｅ %1: %2"

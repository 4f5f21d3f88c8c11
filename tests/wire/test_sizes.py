"""One way of writing bytes, whatever their number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnsight_lab
from nnsight_lab.saves.budget import size_of
from nnsight_lab.wire.sizes import shown_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_999, "1 MB"),
        (570_000_000, "570 MB"),
        (269_060_552, "269.06 MB"),
        (4_000 * 10**9, "4 TB"),
        (10**18, "1,000,000 TB"),
    ],
)
def test_bytes_read_the_same_everywhere(nbytes: int, text: str) -> None:
    assert shown_bytes(nbytes) == text


@given(st.integers(0, 9 * 10**14))
def test_what_is_shown_is_what_was_asked_within_its_digits(nbytes: int) -> None:
    text = shown_bytes(nbytes)
    number, unit = text.split()
    assert float(number) < 1000
    assert size_of(text, name="size") == pytest.approx(nbytes, rel=6e-3)
    assert unit in ("B", "kB", "MB", "GB", "TB")


def test_nobody_writes_bytes_in_words_of_their_own() -> None:
    root = Path(nnsight_lab.__file__).parent
    own = re.compile(r"def \w+\(.*\bn?bytes: .*\) -> str:")
    found = [
        str(path.relative_to(root)) for path in root.rglob("*.py") if own.search(path.read_text("utf-8"))
    ]
    assert found == ["wire/sizes.py"]

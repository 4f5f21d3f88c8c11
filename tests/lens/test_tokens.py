from __future__ import annotations

import html.parser
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nnsight_lab.lens.tokens import as_html, shortened, token_texts, visible

#: Text with much of what tokens have and eyes do not see.
TEXTS = st.text(
    st.one_of(
        st.characters(), st.sampled_from(" \n\t\r\x00\x1b\u200b\u200d\u202e\u2066\ufeff\xad\u3164שע٣<&>'\"")
    )
)
INVISIBLE = {"Cc", "Cn", "Co", "Cs", "Zs", "Zl", "Zp"}


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Every single byte, as GPT-2 spells it, and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*alphabet, "Ġc", "Ġca", "Ġcat", "ĠĠ", "âĢ"])}
    merges = [("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t"), ("Ġ", "Ġ"), ("â", "Ģ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end of text|>")])
    return tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As Llama 2's: a piece with a leading space, and bytes to fall back on."""
    pieces = ["<unk>", "▁cat", "cat", "▁", "▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(TEXTS)
def test_what_is_shown_is_on_one_line_and_has_nothing_that_cannot_be_seen(text: str) -> None:
    shown = visible(text)
    assert len(shown.splitlines()) <= 1
    kinds = {unicodedata.category(c) for c in shown}
    assert not kinds & INVISIBLE
    assert [c for c in shown if unicodedata.category(c) == "Cf"] in ([], ["\u2068", "\u2069"])
    assert bool(text) == bool(shown)
    assert visible(text) == shown


@given(TEXTS, TEXTS)
def test_right_to_left_text_is_isolated_from_what_is_beside_it(one: str, other: str) -> None:
    for shown in (visible(one), visible(other)):
        strong = [c for c in shown if unicodedata.bidirectional(c) in ("R", "AL", "AN")]
        assert not strong or (shown[0], shown[-1]) == ("\u2068", "\u2069")


@given(TEXTS)
def test_html_shows_what_is_visible_and_nothing_else(text: str) -> None:
    found: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_data(self, data: str) -> None:
            found.append(data)

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            raise AssertionError(tag)

    reader = Reader()
    reader.feed(as_html(text))
    reader.close()
    assert "".join(found) == visible(text)
    assert '"' not in as_html(text)


@given(TEXTS, st.integers(1, 12))
def test_a_shortened_text_says_that_it_was_cut_and_stays_isolated(text: str, limit: int) -> None:
    shown = visible(text)
    cut = shortened(shown, limit)
    inner = cut.removeprefix("\u2068").removesuffix("\u2069")
    assert len(inner) <= limit
    assert cut == shown or inner.endswith("…")
    assert cut.count("\u2068") == cut.count("\u2069") == shown.count("\u2068")


def test_whitespace_controls_bytes_and_marks_are_spelled_out() -> None:
    assert visible(" cat\n\t") == "·cat⏎⇥"
    assert visible("\x1b[0m\r") == "\\x1b[0m\\x0d"
    assert visible("a\u200bb\ufeff") == "a\\u200bb\\ufeff"
    assert visible("\U000e0041") == "\\U000e0041"
    assert visible("\xa0") == "\\xa0"
    assert visible("\udce2\udc80") == "<0xE2><0x80>"
    assert visible("\u0301") == "◌\u0301"
    assert visible("e\u0301") == "e\u0301"
    assert visible("שלום") == "\u2068שלום\u2069"
    assert visible("日本") == "日本"
    assert as_html('<b a="1">&') == "&lt;b·a=&quot;1&quot;&gt;&amp;"


@settings(max_examples=60)
@given(text=st.text(max_size=30))
def test_byte_level_texts_of_ids_are_the_text_itself(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text).ids
    spelled = "".join(token_texts(byte_level, ids)).encode()
    if "<0x" not in text:
        assert re.sub(rb"<0x(..)>", lambda found: bytes.fromhex(found[1].decode()), spelled) == text.encode()


def test_byte_level_tokens_keep_spaces_and_show_part_of_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("  cat…").ids
    assert "".join(token_texts(byte_level, ids)) == "  cat<0xE2><0x80><0xA6>"
    assert token_texts(byte_level, [byte_level.token_to_id("Ġcat")]) == (" cat",)
    end = byte_level.token_to_id("<|end of text|>")
    assert token_texts(byte_level, [end, 10**6, -1]) == ("<|end of text|>", "<id 1000000>", "<id -1>")


def test_sentencepiece_tokens_keep_their_leading_space(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece.token_to_id(piece) for piece in ("▁cat", "cat", "▁▁", "<0x0A>", "<0xE2>")]
    assert token_texts(sentencepiece, ids) == (" cat", "cat", "  ", "\n", "<0xE2>")
    assert sentencepiece.decode(ids[:1]) == "cat"  # the reason for all this


def test_a_tokenizer_of_transformers_is_read_the_same(byte_level: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level)
    ids = [*byte_level.encode(" cat…").ids, byte_level.token_to_id("<|end of text|>"), 10**6]
    assert token_texts(wrapped, ids) == token_texts(byte_level, ids)


def test_a_tokenizer_with_nothing_but_decode_is_decoded() -> None:
    class Plain:
        def decode(self, ids: list[int]) -> str:
            return {1: " one"}[ids[0]]

    assert token_texts(Plain(), [1, 2]) == (" one", "<id 2>")


def test_the_demo_models_tokenizer_reads_back_its_own_text() -> None:
    from nnsight_lab.engine.demo import cache_dir

    folders = [path.parent for path in Path(cache_dir()).glob("models/*/tokenizer.json")]
    if not folders:
        pytest.skip("the demo model was not made on this machine")
    tokenizer = Tokenizer.from_file(str(folders[0] / "tokenizer.json"))
    text = "The Eiffel  Tower\n\tis in Paris, 42 times."
    assert "".join(token_texts(tokenizer, tokenizer.encode(text).ids)) == text

"""How a token is shown, and what text a token id stands for.

The hard fact: a token is bytes, and much of what matters about it cannot be seen. ``decode([id])`` drops a
leading space with SentencePiece and turns part of a character into the same ``�`` for every byte there is;
a zero-width or right-to-left character changes how its neighbours look. So texts come from the tokenizer's
own pieces, a byte that is only part of a character reads ``<0xE2>``, and what cannot be seen is spelled out.
A text shown so may look like another token's (a real ``·``): the id, shown beside it, is what is exact.
Nothing here is HTML but `as_html`.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

_SHOWN: Final = {" ": "·", "\n": "⏎", "\t": "⇥"}
#: Letters and symbols that are drawn as nothing at all.
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
#: Format and control characters, private and unassigned ones, surrogates, and spaces that are not the space.
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zs", "Zl", "Zp"})
_RIGHT_TO_LEFT: Final = frozenset({"R", "AL", "AN"})
_FIRST_STRONG, _POP = "\u2068", "\u2069"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def visible(text: str) -> str:
    r"""A token's text in characters that can be seen, on one line.

    A space is ``·``, a newline ``⏎``, a tab ``⇥``; other control characters ``\x1b``, zero-width and format
    characters ``\u200b``, a byte kept by ``surrogateescape`` ``<0xE2>``. A mark that would combine with
    what stands before it gets a dotted circle. Text with right-to-left characters is isolated, so that it
    does not reorder what is beside it.
    """
    if text.isascii() and text.isprintable():
        return text.replace(" ", "·")
    shown = "".join(map(_visible, text))
    if shown and unicodedata.category(shown[0]).startswith("M"):
        shown = "◌" + shown
    if any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in shown):
        shown = f"{_FIRST_STRONG}{shown}{_POP}"
    return shown


def _visible(character: str) -> str:
    known = _SHOWN.get(character)
    if known is not None:
        return known
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"<0x{code - 0xDC00:02X}>"
    if character not in _BLANK and unicodedata.category(character) not in _UNSEEN:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def as_html(text: str) -> str:
    """`visible`, escaped for HTML text and quoted attributes."""
    return html.escape(visible(text))


def shortened(text: str, limit: int) -> str:
    """A shown text of at most ``limit`` characters, with ``…`` where something is left out.

    What isolates right-to-left text is kept around what is left, and not counted.
    """
    inner = text.removeprefix(_FIRST_STRONG).removesuffix(_POP)
    if len(inner) <= limit:
        return text
    cut = inner[: max(limit - 1, 0)] + "…"
    return f"{_FIRST_STRONG}{cut}{_POP}" if inner != text else cut


def token_texts(tokenizer: Any, ids: Iterable[int]) -> tuple[str, ...]:
    """What each token id stands for, leading spaces kept.

    Args:
        tokenizer: Of transformers (fast or slow), of the tokenizers package, or any with ``decode``.
        ids: Token ids, each by itself.

    Returns:
        A text per id. Bytes that are only part of a character read ``<0xE2>``, an id that the tokenizer
        does not know ``<id 50000>``. Every text can be encoded as UTF-8. To be shown, pass it to `visible`.
    """
    pieces = _Pieces(tokenizer)
    known: dict[int, str] = {}
    found = []
    for token_id in map(int, ids):
        if token_id not in known:
            known[token_id] = pieces.text(token_id)
        found.append(known[token_id])
    return tuple(found)


class _Pieces:
    """A tokenizer's own pieces, and what kind they are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._piece = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(
            backend, "id_to_token", None
        )
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None and hasattr(backend, "get_added_tokens_decoder"):
            added = backend.get_added_tokens_decoder()
        self._added = added if isinstance(added, Mapping) else {}
        kinds = _decoders(getattr(backend, "decoder", None))
        self._byte_level = "ByteLevel" in kinds or hasattr(tokenizer, "byte_decoder")
        self._metaspace = "▁" in kinds or hasattr(tokenizer, "sp_model")

    def text(self, token_id: int) -> str:
        added = self._added.get(token_id)
        if added is not None:
            return str(getattr(added, "content", added))
        piece = self._piece_of(token_id)
        if isinstance(piece, bytes):
            return _text(piece)
        if piece is None:
            return f"<id {token_id}>" if self._piece is not None else self._decoded(token_id)
        if self._byte_level:
            mapped = _bytes_of()
            if all(character in mapped for character in piece):
                return _text(bytes(mapped[character] for character in piece))
            return piece
        if self._metaspace:
            byte = _BYTE_PIECE.fullmatch(piece)
            return _text(bytes([int(byte[1], 16)])) if byte else piece.replace("▁", " ")
        return piece

    def _piece_of(self, token_id: int) -> str | bytes | None:
        if self._piece is None or token_id < 0:
            return None
        try:
            piece: str | bytes | None = self._piece(token_id)
        except (IndexError, KeyError, OverflowError, ValueError):
            return None
        return piece if isinstance(piece, bytes) or piece is None else str(piece)

    def _decoded(self, token_id: int) -> str:
        try:
            return str(self._tokenizer.decode([token_id]))
        except (IndexError, KeyError, OverflowError, ValueError):
            return f"<id {token_id}>"


def _text(piece: bytes) -> str:
    text = piece.decode("utf-8", "surrogateescape")
    if text.isascii():
        return text
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)


def _decoders(decoder: Any) -> set[str]:
    """The kinds of a decoder's parts, and ``"▁"`` where it makes spaces of that."""
    try:
        state = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return set()
    found: set[str] = set()
    parts = [state]
    while parts:
        part = parts.pop()
        found.add(str(part.get("type")))
        parts.extend(part.get("decoders", ()))
        pattern = part.get("pattern")
        if part.get("type") == "Metaspace" or (isinstance(pattern, dict) and pattern.get("String") == "▁"):
            found.add("▁")
    return found


@lru_cache(maxsize=1)
def _bytes_of() -> dict[str, int]:
    """GPT-2's characters for bytes (openai/gpt-2, ``src/encoder.py``): printable ones are themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapped = {chr(byte): byte for byte in kept}
    others = (byte for byte in range(0x100) if byte not in set(kept))
    mapped.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return mapped

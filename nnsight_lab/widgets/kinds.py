"""The words of the conversation between a widget and its views.

`labextension/src/widgets/kinds.ts` mirrors them, and a test compares the two.

A view asks ``{"ask": id, "kind": …}`` and gets ``{"answer": id, …, "last": …}`` back, with buffers: ids are
the view's own and unique, so that a view takes only its own answers.
"""

from __future__ import annotations

from typing import Final

#: Keys.
ASK: Final = "ask"
ANSWER: Final = "answer"
KIND: Final = "kind"
LAST: Final = "last"
ERROR: Final = "error"
DROPPED: Final = "dropped"
VIEW: Final = "view"

#: What every view says.
HERE: Final = "here"
GONE: Final = "gone"
FAILED: Final = "failed"

#: What a heatmap is asked.
TILES: Final = "tiles"
LINE: Final = "line"
VALUE: Final = "value"
DETAIL: Final = "detail"
LABELS: Final = "labels"

#: What a browser of saves is asked.
PAGE: Final = "page"
STATISTICS: Final = "statistics"
OPEN: Final = "open"
TEXT: Final = "text"
COMPARE: Final = "compare"
WRITE: Final = "write"
KEEP: Final = "keep"
DROP: Final = "drop"
#: What the strip below a cell is asked, besides `OPEN`.
CLOSE: Final = "close"
#: What a browser says unasked.
CHANGED: Final = "changed"

#: What a lens and an attention view are asked.
PROMPT: Final = "prompt"
CELLS: Final = "cells"
CELL: Final = "cell"
HEADS: Final = "heads"
#: What a view of a sequence is told, and what a token strip is asked.
CHOOSE: Final = "choose"
TOKENS: Final = "tokens"
STOP: Final = "stop"
#: What a live view says unasked: there is more.
GREW: Final = "grew"

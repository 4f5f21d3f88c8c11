"""The tokens of a saved request's prompt, from the tokenizer of the engine that ran it.

Labels hold the prompt's text, not its tokens, so it is read again; that is done for the one save that is
opened. A fast tokenizer refuses a second thread while another uses it, so this one is a copy. The engine is
held weakly: a forgotten view keeps no model.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

from nnsight_lab.lens.tokens import token_texts
from nnsight_lab.saves.label import SaveLabel


class PromptTokens:
    """Called with a label, gives the tokens of its prompt; None where it was another engine's.

    Args:
        engine: Has a ``name`` and a ``tokenizer``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def __call__(self, label: SaveLabel) -> tuple[str, ...] | None:
        engine = self._engine()
        if engine is None or not label.prompt or label.engine != engine.name:
            return None
        with self._lock:
            try:
                if self._tokenizer is None:
                    self._tokenizer = copy.deepcopy(engine.tokenizer)
                return token_texts(self._tokenizer, self._tokenizer(label.prompt)["input_ids"])
            except Exception:  # a label beside a picture is not worth the picture
                return None

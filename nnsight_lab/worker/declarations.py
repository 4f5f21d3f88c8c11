"""Builds the blocks that travel as data, and refuses all others where that is asked for.

At level ``strict`` the server lets no code through to here; that it is refused here as well is what makes the
level true should there ever be another way in.
"""

from __future__ import annotations

from typing import Any

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import block_of, told
from nnsight_lab.errors import EditRefused
from nnsight_lab.worker.stepping import locations, steps_block
from nnsight_lab.worker.steps import Steps


class Declarations:
    """Those of one worker.

    Args:
        model: Its root envoy.
        vllm_config: VLLM's.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self._model = model
        found = vllm_config.model_config
        self._layers = int(found.hf_text_config.num_hidden_layers)
        self._hidden = int(found.get_hidden_size())
        #: Whether blocks of code are refused; once they are, for as long as this worker lives.
        self.strict = False

    def refuse_code(self) -> None:
        """Refuse to unpickle a block, where none is taken.

        Raises:
            EditRefused: This engine is of level ``strict``.
        """
        if self.strict:
            raise EditRefused("this engine runs edits that are data (steps=), and no block of code")

    def block(self, payload: bytes) -> Block:
        """The block that a payload names.

        Raises:
            EditRefused, WireError: It names none, or one that does not fit the model.
        """
        kind, asked = told(payload)
        if kind == "steps":
            return steps_block(self._model, asked, layers=self._layers, hidden=self._hidden)
        return block_of(kind, model=self._model, asked=asked)

    def wide(self, block: Block, steps: Steps) -> str:
        """What a block waits for that no replay serves; empty where it is served."""
        if "steps" not in block.lcls or not steps.taps:
            return ""
        return next((one for one in locations(block) if one not in steps.taps), "")

"""What a block finds in the worker under the names of things that stay in the kernel.

A block that says ``tracer.all()`` or ``engine.model`` means the worker's own tracer and model; the
kernel's objects hold prompts, locks and processes, and do not travel.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Any, NoReturn

from nnsight.modeling.vllm.tracer import VLLMTracer


def block_tracer(model: Any) -> VLLMTracer:
    """The ``tracer`` of a block: nnsight's own, on the worker's model."""
    return VLLMTracer(model, "__call__")


@dataclass(frozen=True)
class BlockEngine:
    """The ``engine`` of a block: its model and tokenizer, nothing that acts.

    Attributes:
        model: The worker's envoy tree.
    """

    model: Any

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer


class BlockShell:
    """The ``get_ipython()`` of a block: its shell lines run where the block does, in the worker.

    ``files = !ls`` has its lines; what ``!command`` prints is in the engine's log.
    """

    def system(self, command: str) -> None:
        """``!command``."""
        subprocess.run(command, shell=True, check=False)

    def getoutput(self, command: str, *_: Any, **__: Any) -> list[str]:
        """``lines = !command``."""
        done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
        return done.stdout.splitlines()

    def run_line_magic(self, name: str, *_: Any, **__: Any) -> NoReturn:
        """Refused: magics are the notebook's, and the block is not there."""
        raise RuntimeError(f"%{name} cannot run inside the model: move it above or below the block's cell")

    run_cell_magic = run_line_magic


def get_ipython() -> BlockShell:
    """What IPython writes for a shell line."""
    return BlockShell()

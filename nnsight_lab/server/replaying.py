"""How a served engine keeps CUDA graphs though blocks run in it.

vLLM's own defaults compile the model and replay it, which runs no Python: no module would hand anything to a
block. So a served engine has what one of a kernel has (see `nnsight_lab.engine.model`): graphs of generation
that stop at taps, and prompts that run module by module. Where its owner asks for eager steps there are no
graphs; what its owner says of compilation is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from typing import Any

from nnsight_lab.blocks.taps import DECODER_LAYERS

_EAGER = "--enforce-eager"
_COMPILATION = ("--compilation-config", "-cc", "-O")


def flags(given: Sequence[str], *, on_cpu: bool) -> list[str]:
    """VLLM's arguments beside those that were given."""
    if on_cpu:
        return [_EAGER]
    if _EAGER in given or any(flag.startswith(_COMPILATION) for flag in given):
        return []
    return [f"--compilation-config={json.dumps({'mode': 0, 'cudagraph_mode': 'FULL_DECODE_ONLY'})}"]


def additional(given: Sequence[str], *, on_cpu: bool) -> dict[str, Any]:
    """What the workers are told."""
    return {} if on_cpu or _EAGER in given else {"nnsight_taps": [DECODER_LAYERS]}


def surroundings(environment: MutableMapping[str, str], given: Sequence[str], *, on_cpu: bool) -> None:
    """What vLLM reads from the environment: graphs that may stop."""
    if not on_cpu and _EAGER not in given:
        environment["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"

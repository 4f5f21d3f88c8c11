"""What a server says of its engine and model, so that kernels need neither weights nor vLLM."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from nnsight_lab.engine.facts import facts
from nnsight_lab.wire.serving import PROTOCOL, ModuleSeen, Served

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "config.json",
)
_TOKENIZER_BYTES = 32 * 2**20


def served(
    vllm_config: Any,
    modules: tuple[ModuleSeen, ...],
    *,
    level: str,
    jail: str,
    user: str,
    admin: bool,
    saved_bytes: int,
    requests: int,
    door: str,
) -> Served:
    """The whole description, for one user."""
    from vllm import SamplingParams, __version__

    names = SamplingParams.__struct_fields__
    return Served(
        protocol=PROTOCOL,
        versions={
            "nnsight_lab": metadata.version("nnsight-lab"),
            "nnsight": metadata.version("nnsight"),
            "vllm": str(__version__),
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        level=level,
        jail=jail,
        user=user,
        admin=admin,
        facts=facts(vllm_config),
        modules=modules,
        sampling=tuple(name for name in names if not name.startswith("_")),
        saved_bytes=saved_bytes,
        requests=requests,
        door=door,
        tokenizer=_tokenizer(str(vllm_config.model_config.tokenizer)),
    )


def _tokenizer(where: str) -> dict[str, bytes]:
    """The tokenizer's files, where they lie in a folder; a hub's are fetched by name."""
    folder = Path(where)
    if not folder.is_dir():
        return {}
    found = {name: folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
    if sum(path.stat().st_size for path in found.values()) > _TOKENIZER_BYTES:
        return {}
    return {name: path.read_bytes() for name, path in found.items()}

"""The envoy tree of a model that is served elsewhere: built from what the server says of it.

It has the paths, classes and parameter shapes of the served model, no weights and no vLLM: a kernel attaches
in the time that nnsight takes to import.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nnsight.intervention.envoy import Envoy

from nnsight_lab.engine.model import LabVLLM
from nnsight_lab.errors import RequestRefused
from nnsight_lab.wire.serving import ModuleSeen, Served


class RemoteTree(LabVLLM):
    """The tree.

    Args:
        served: What the server said.
    """

    def __init__(self, served: Served) -> None:
        self.__dict__["_served"] = served
        self.__dict__["_lazy_tokenizer"] = None
        self.vllm_entrypoint = None
        self.taps = ()
        self._async_engine = True
        self._owns_distributed = False
        self._installed_edits: list[Any] = []
        self.dispatched = True
        Envoy.__init__(self, module_of(served.modules))
        self.args = (served.facts.model,)
        self.kwargs: dict[str, Any] = {}
        for envoy in self.modules():
            envoy.__dict__["_persistent_id"] = f"Envoy:{envoy.path}"

    @property
    def tokenizer(self) -> Any:
        """The served model's tokenizer, from the files that the server sent."""
        if self.__dict__["_lazy_tokenizer"] is None:
            self.__dict__["_lazy_tokenizer"] = tokenizer_of(self.__dict__["_served"])
        return self.__dict__["_lazy_tokenizer"]

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.__dict__["_lazy_tokenizer"] = value

    def _prompt(self, *inputs: Any) -> Any:
        """A prompt as it travels: text, token ids, or one of vLLM's dictionaries."""
        (prompt,) = inputs
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, Mapping):
            if "input_ids" not in prompt:
                return dict(prompt)
            prompt = self._tokenized_ids(prompt)
        ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if not ids or not all(isinstance(one, int) for one in ids):
            raise RequestRefused("A prompt is text, or token ids of one sequence.")
        return {"prompt_token_ids": ids}

    @staticmethod
    def _tokenized_ids(inputs: Mapping[str, Any]) -> list[int]:
        """The ids of a tokenizer's output that its mask keeps."""

        def row(value: Any) -> list[int]:
            listed: list[Any] = value.tolist() if hasattr(value, "tolist") else list(value)
            if listed and isinstance(listed[0], list):
                if len(listed) > 1:
                    raise RequestRefused("A prompt is one sequence, and the tokenizer's output has several.")
                listed = listed[0]
            return listed

        ids = row(inputs["input_ids"])
        mask = inputs.get("attention_mask")
        return ids if mask is None else [one for one, kept in zip(ids, row(mask), strict=True) if kept]


def module_of(modules: Sequence[ModuleSeen]) -> torch.nn.Module:
    """Modules without weights that have the names, classes' names and parameter shapes of others.

    Args:
        modules: Parents before children, the model itself first.
    """
    kinds: dict[str, type[torch.nn.Module]] = {"ModuleList": torch.nn.ModuleList}
    built: dict[str, torch.nn.Module] = {}
    for seen in modules:
        kind = kinds.get(seen.kind)
        if kind is None:
            kind = kinds[seen.kind] = type(seen.kind, (torch.nn.Module,), {"__module__": __name__})
        module = built[seen.path] = kind()
        for name, shape, dtype in seen.parameters:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        if seen.path:
            parent, _, name = seen.path.rpartition(".")
            built[parent].add_module(name, module)
    return built[""]


def tokenizer_of(served: Served) -> Any:
    """A tokenizer from its files, or from the model hub where the server has none to send."""
    from transformers import AutoTokenizer  # a second or more, and few cells need one

    if not served.tokenizer:
        return AutoTokenizer.from_pretrained(served.facts.model)
    digest = hashlib.sha256()
    for name, data in sorted(served.tokenizer.items()):
        digest.update(name.encode() + b"\0" + data)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "nnsight_lab" / "tokenizers" / digest.hexdigest()[:16]
    if not folder.is_dir():
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        making.mkdir(parents=True, exist_ok=True)
        for name, data in served.tokenizer.items():
            # A server that is not trusted must not choose where files go.
            (making / Path(name).name).write_bytes(data)
        try:
            making.rename(folder)
        except OSError:  # another kernel was first
            for left in making.iterdir():
                left.unlink()
            making.rmdir()
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)

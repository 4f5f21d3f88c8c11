"""Prompts and sampling settings, checked before anything is submitted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nnsight_lab.errors import RequestRefused, nearest


def sampling_params(settings: Mapping[str, Any]) -> Any:
    """VLLM's ``SamplingParams`` from keyword arguments.

    Args:
        settings: vLLM's names; ``max_new_tokens`` is taken for ``max_tokens``.

    Raises:
        RequestRefused: For a name vLLM does not have, or a value it refuses.
    """
    import msgspec  # vLLM brings it: a kernel that only attaches may have neither
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = dict(settings)
    if "max_new_tokens" in settings:
        settings.setdefault("max_tokens", settings.pop("max_new_tokens"))
        settings.pop("max_new_tokens", None)
    known = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    for name in settings:
        if name not in known:
            raise RequestRefused(f"{name!r} is not a sampling setting.{nearest(name, known)}")
    try:
        if isinstance(settings.get("structured_outputs"), Mapping):
            settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
        params = SamplingParams(**settings)
        # vLLM's constructor does not look at every type, and its engine dies of a wrong one: its
        # one input thread ends, and every later call waits for ever.
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        return params
    except Exception as error:
        if not _refused(error) and not isinstance(error, AttributeError):
            raise
        raise RequestRefused(f"{_line(error)} (given: {_shown(settings)})") from None


def prompt_list(inputs: Sequence[Any]) -> tuple[list[Any], bool]:
    """The prompts of a call, and whether the caller gave several.

    One prompt is a string, a list of token ids, a tokenizer's output or one of vLLM's prompt
    dictionaries; several are a list of those, or several arguments.

    Raises:
        RequestRefused: For an empty list or an empty prompt.
    """
    if len(inputs) > 1:
        return list(inputs), True
    if not inputs:
        return [], False
    given = inputs[0]
    if hasattr(given, "tolist") and not isinstance(given, Mapping):
        given = given.tolist()  # a tensor or array of token ids
    if isinstance(given, str | Mapping):
        if given == "":
            raise RequestRefused("The prompt is empty.")
        return [given], False
    try:
        items = list(given)
    except TypeError:
        raise RequestRefused(f"A prompt is text or token ids, not {type(given).__name__}.") from None
    if not items:
        raise RequestRefused("There is no prompt: the list is empty.")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items], False
    for index, item in enumerate(items):
        if not isinstance(item, str | Mapping | list | tuple) or item in ("", [], ()):
            raise RequestRefused(f"Prompt {index} is {item!r}: a prompt is text or token ids, not empty.")
    return items, True


def refusal(error: BaseException) -> RequestRefused | None:
    """VLLM's refusal of a request as ours, or None where the error is of another kind."""
    return RequestRefused(_line(error)) if _refused(error) else None


def _refused(error: BaseException) -> bool:
    """Whether vLLM blames the request: a ValueError in older versions, a tree of its own since."""
    if "vllm" not in sys.modules:  # then it is none of vLLM's
        return False
    import msgspec
    from vllm import exceptions

    own = (getattr(exceptions, "VLLMClientError", ValueError), msgspec.MsgspecError)
    return isinstance(error, (ValueError, TypeError, own))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())

"""`nnsight_lab.bench.speed`'s figures as a page: what they were measured on, and what repeats them."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any, Final

_SAID: Final = {
    "nothing_registered_vs_plain": "generate, nothing registered",
    "one_layer_vs_plain": "one layer saved from the prompt",
    "logits_every_token_vs_plain": "logits read at every token",
    "probe_every_token_vs_plain": "a probe at every token",
    "steer_every_token_vs_plain": "one layer steered at every token",
    "trace128_vs_plain": "a trace over all prompts",
    "all_layers_vs_plain": "all residual streams saved, long prompts",
    "single_stream_vs_plain": "one stream, steered at every token",
}


def markdown(found: dict[str, Any], command: str, note: str = "") -> str:
    """The page.

    Args:
        found: What `measure` returned, with ``versions``.
        command: What makes it again.
        note: What should be known of the machine; may be empty.
    """
    versions = {"python": platform.python_version(), **found["versions"]}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    rows = [f"| {_SAID[name]} | {found[name]:.2f} |" for name in _SAID if name in found]
    told = [
        "# Our engine beside plain vLLM with its defaults",
        f"{date}, {os.cpu_count()} cores; {named}; "
        f"{found['prompts']} prompts x 128 tokens with 64 new ones, {found['long_prompts']} x 512 with one; "
        f"medians of {found['rounds']} rounds, in turns.",
        note,
        f"```bash\n{command}\n```",
        "\n".join(["| | time / plain vLLM's |", "|---|---:|", *rows]),
    ]
    return "\n\n".join(part for part in told if part) + "\n"

"""What `tracer` and `edit` look like, for completion before an engine can say it itself.

Only names and docstrings: nothing here runs. nnsight's own classes are not used, since importing them
loads torch.
"""

from __future__ import annotations

from typing import Any


class TracerShape:
    """The tracer of a block."""

    outputs: list[Any]
    iter: Any
    result: Any

    def invoke(self, *prompts: Any, **sampling: Any) -> Any:
        """One request of several in this trace; its block is its own."""

    def stop(self) -> None:
        """Ends the forward pass here, when what was needed has been read."""

    def all(self) -> Any:
        """Runs what is below it at every generated token."""

    def cache(self, *modules: Any, **options: Any) -> Any:
        """Keeps the outputs of many modules at once."""


class EditShape:
    """An installed edit."""

    name: str
    version: int
    on: bool
    source: str
    hits: int
    errors: int
    last_error: str | None

    def switch_on(self) -> None:
        """Requests run it from now on."""

    def switch_off(self) -> None:
        """Requests do not run it; it stays installed."""

    def clear(self) -> None:
        """Removes it."""

"""The Jupyter server's part of the side panel: engines and GPUs of this machine, whatever the kernels do.

A kernel that is dead, or computes in C code and holds Python's lock, answers no question; its engine goes on
holding memory. The server sees the processes. It runs in the environment of the server, which may be another
than the kernels', so this room loads neither torch, vLLM, nnsight nor IPython. It starts nothing, and ends
only this user's processes whose kernel is gone, and engines that need none. Installing the wheel enables it,
by a file in `etc/jupyter`.
"""

from __future__ import annotations

from typing import Any

from nnsight_lab import __version__
from nnsight_lab.jupyter_server.handlers import routes

__all__ = ["__version__"]  # what `jupyter server extension list` shows


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Asked by the server: where the extension is."""
    return [{"module": "nnsight_lab.jupyter_server"}]


def _load_jupyter_server_extension(app: Any) -> None:
    """Called by the server as it starts."""
    app.web_app.add_handlers(".*$", routes(app.web_app.settings["base_url"]))
    app.log.info("nnsight-lab %s tells the panel of the engines and GPUs of this machine", __version__)

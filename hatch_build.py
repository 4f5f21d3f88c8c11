"""What a wheel and an sdist need on top of pyproject.toml: the browser's part, built before.

Installing must not need node, so the built files travel in both. JupyterLab looks for its extension in
`share/jupyter`, and its server for the file that enables its own in `etc/jupyter`, not in packages. An
editable install has neither: `scripts/setup.sh` builds and links there.
It refuses to make an archive without them, which would install and then show no widget and no panel; or with
what `make lab-dev` built, which is several times larger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WIDGETS = "nnsight_lab/widgets/static/heatmap.js"
LABEXTENSION = "nnsight_lab/labextension"
#: Left by a development build, removed by the next other one.
DEVELOPMENT = "labextension/node_modules/.cache/nnsight-lab/development"
INSTALLED = "share/jupyter/labextensions/nnsight-lab"
SERVER_CONFIG = "jupyter_server_config.d/nnsight-lab.json"


class BrowserPart(BuildHookInterface[Any]):
    """Sees that the browser's part is there, and ships it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        for built in (WIDGETS, f"{LABEXTENSION}/install.json"):
            if not (root / built).is_file():
                raise FileNotFoundError(
                    f"{built} was not built: scripts/setup.sh widgets (it needs node 20.19 or newer, and npm)"
                )
        if (root / DEVELOPMENT).exists():
            raise RuntimeError(
                "the browser's part is a development build: scripts/setup.sh widgets makes the other"
            )
        if self.target_name == "wheel":
            build_data["shared_data"][str(root / "jupyter-config" / SERVER_CONFIG)] = (
                f"etc/jupyter/{SERVER_CONFIG}"
            )
            # The second copy of package.json is for JupyterLab's own development builds.
            for path in sorted((root / LABEXTENSION).rglob("*")):
                if path.is_file() and path.suffix not in (".map", ".orig"):
                    inside = path.relative_to(root / LABEXTENSION).as_posix()
                    build_data["shared_data"][str(path)] = f"{INSTALLED}/{inside}"

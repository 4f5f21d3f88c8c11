"""Many requests of OpenAI clients under a saving edit of a served engine: whether anything grows.

Nobody collects what such a request saves unless somebody asks for it, so most of what is here could stay:
entries in the workers, saves in the server, slabs. Of the saves one in ten is fetched, one in fifty is left
to its time, the rest is dropped by the client. What is counted is each process's own memory (USS without the
pages of slabs), after free memory of the worker's heap was given back; the first part of the requests fills
caches and does not count.

Run as ``python -m nnsight_lab.bench.soak_served --requests 10000``: it keeps an engine of its own for that.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil

import nnsight_lab as lab
from nnsight_lab.engine.local import Engine
from nnsight_lab.saves.slab_files import PREFIX as SLAB
from nnsight_lab.wire.serving import PREFIX

_AT_ONCE = 16
_TOKENS = 5


@dataclass(frozen=True)
class Look:
    """One look.

    Attributes:
        requests: How many were done.
        uss_bytes: By process.
        tracked: Requests that a worker still tracks.
        slab_bytes: What all slabs take.
        kept_bytes: What the server keeps for who may ask.
    """

    requests: int
    uss_bytes: dict[str, int]
    tracked: int
    slab_bytes: int
    kept_bytes: int


def soak(
    client: Callable[[], httpx.Client],
    model: str,
    server: int,
    *,
    requests: int,
    every: int,
    at_once: int = _AT_ONCE,
    say: Callable[[str], None] = lambda text: None,
) -> list[Look]:
    """Send them, and look from time to time.

    Args:
        client: Makes a client of an admin whose edits run.
        model: What the server calls its model.
        server: The server's process.
        requests: How many.
        every: How many between two looks.
        at_once: How many are under way together.
        say: Told of each look.
    """
    with client() as asking, ThreadPoolExecutor(at_once) as threads:
        looks = []
        for done in range(0, requests, every):
            looks.append(_look(asking, server, done))
            say(json.dumps(asdict(looks[-1])))
            many = range(done, min(done + every, requests))
            list(threads.map(lambda number: _one(asking, model, number), many))
        looks.append(_look(asking, server, requests))
        say(json.dumps(asdict(looks[-1])))
    return looks


def _one(http: httpx.Client, model: str, number: int) -> None:
    prompt = [(7 * number + 13 * j + number // 97) % 200 for j in range(_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    done = http.post("/v1/completions", json=body).raise_for_status().json()
    where = f"{PREFIX}/saves/{done['id']}"
    if number % 10 == 0:
        assert len(http.get(where).raise_for_status().content) > 1000
    if number % 50:
        http.delete(where).raise_for_status()


def _look(http: httpx.Client, server: int, requests: int) -> Look:
    held = http.get(f"{PREFIX}/workers", params={"trim": True}).raise_for_status().json()
    kept = http.get(f"{PREFIX}/health").raise_for_status().json()
    parent = psutil.Process(server)
    uss = {"server": _uss(server)}
    for child in parent.children(recursive=True):
        name = (child.cmdline() or [""])[0].removeprefix("VLLM::").rpartition("/")[2]
        uss[name if name not in uss else f"{name} {child.pid}"] = _uss(child.pid)
    return Look(requests, uss, held["tracked"], held["total_bytes"], kept["kept_bytes"])


def _uss(pid: int) -> int:
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return sum(one.private_clean + one.private_dirty for one in maps if SLAB not in one.path)


def growth(looks: Sequence[Look], settled: int) -> dict[str, float]:
    """Bytes a request by which each process grew, from the first look at ``settled`` requests or later."""
    counted = [look for look in looks if look.requests >= settled]
    first, last = counted[0], counted[-1]
    requests = max(1, last.requests - first.requests)
    shared = first.uss_bytes.keys() & last.uss_bytes.keys()
    grown = {name: last.uss_bytes[name] - first.uss_bytes[name] for name in shared}
    return {name: round(nbytes / requests, 1) for name, nbytes in grown.items()}


def install(engine: Engine) -> None:
    """The edit: every residual stream of a request."""
    layers = engine.model.model.layers
    with engine.edit("all"):
        found: Any = [lab.residual(layer.output) for layer in layers]
        streams = found.save()  # noqa: F841


def main() -> None:
    """Keep an engine, and measure it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    arguments = parser.parse_args()
    engine: Any = lab.start(
        arguments.model, name=f"soak-{os.getpid()}", keep=True, max_model_len=256, max_num_seqs=_AT_ONCE
    )
    try:
        install(engine)
        socket = engine.url.removeprefix("unix:")

        def client() -> httpx.Client:
            pool = httpx.Limits(max_connections=_AT_ONCE)
            return httpx.Client(
                transport=httpx.HTTPTransport(uds=socket, limits=pool),
                base_url="http://localhost",
                timeout=600,
            )

        pid = next(one.pid for one in lab.kept() if one.engine == engine.id)
        began = time.monotonic()
        looks = soak(
            client, arguments.model, pid, requests=arguments.requests, every=arguments.every, say=print
        )
        took = time.monotonic() - began
        settled = arguments.requests * 3 // 10
        told = {
            "bytes_per_request": growth(looks, settled),
            "requests_per_s": round(arguments.requests / took, 1),
            "tracked": looks[-1].tracked,
            "slab_mb": round(looks[-1].slab_bytes / 1e6, 1),
        }
        print(json.dumps(told))
    finally:
        lab.stop(engine.name)


if __name__ == "__main__":
    main()

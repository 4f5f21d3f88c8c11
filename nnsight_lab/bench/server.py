"""What a shared engine costs: its OpenAI side beside plain vLLM's, its traces beside an engine of one's own.

Plain vLLM's OpenAI server, ours, and an engine in this process stand side by side; each works while the
others wait, in rounds. The floors: an OpenAI request without edits should cost nothing (the plugin looks at
its owner and passes it on); a trace one HTTP exchange over loopback, which is under a millisecond, and what
encodes and decodes it; saves that are fetched one copy into a socket and one out of it; saves that are mapped
nothing but their pages. Of saves the *road* is timed: from being told of a reply to having its values.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import torch

import nnsight_lab as lab
from nnsight_lab import pins
from nnsight_lab.bench import rounds
from nnsight_lab.bench.engine import prompts
from nnsight_lab.engine import models
from nnsight_lab.engine.local import Engine
from nnsight_lab.engine.log import EngineLog
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import EngineStartFailed

_START_S = 600.0
_AT_ONCE = 32
_PAGE_BYTES = 4096
#: What both servers call the model; ours calls it so anyhow.
_NAME = models.DEMO
_ATTACH = """
import os, time
began = time.perf_counter()
import nnsight_lab as lab
engine = lab.attach({url!r})
engine.model.model
print(time.perf_counter() - began)
engine.stop()
"""


def measure(
    model: str = models.DEMO,
    *,
    count: int = 64,
    tokens: int = 16,
    repeat: int = 7,
    traces: int = 40,
    saves_mb: int = 1000,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure all of it.

    Args:
        model: As for `nnsight_lab.start`.
        count: Prompts of one work of the OpenAI side, half as many at once at most.
        tokens: New ones of each.
        repeat: Rounds that count.
        traces: How many single traces each engine runs; saves are brought home a fifth as often.
        saves_mb: What one request saves.
        say: Told what is going on.
        **options: vLLM engine options, the same for all three.

    Returns:
        The ratios, and the seconds behind them.
    """
    options.setdefault("max_model_len", 512)
    path = models.resolve(model, dummy=options.get("load_format") == "dummy")
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="nnsight-lab-bench-")))
        token = secrets.token_urlsafe(32)
        say("starting plain vLLM's server, and ours")
        plain = stack.enter_context(_served(_plain_words(path, options), folder / "plain.log", {}))
        words = [sys.executable, "-m", "nnsight_lab", "serve", path, *_UNCACHED, *_flags(options)]
        ours = stack.enter_context(_served(words, folder / "ours.log", {"NNSIGHT_LAB_TOKEN": token}))
        openai = openai_side(stack, {"plain": (plain, ""), "ours": (ours, token)}, count, tokens, repeat, say)
        attach_s = statistics.median(attached(ours, token) for _ in range(3))
        say("starting an engine in this process")
        own = lab.start(path, name="bench-own", mode="sync", enable_prefix_caching=False, **options)
        stack.callback(lab.stop, own.name)
        near = _attach(stack, "bench-near", ours, token)
        far = _attach(stack, "bench-far", ours, token, same_host=False)
        single = rounds.run(
            {"own": lambda: _trace(own), "remote": lambda: _trace(far)}, traces, warm_up=min(5, traces)
        )
        saved = roads({"fetched": far, "mapped": near}, saves_mb * 10**6, max(1, traces // 5), say)
    return {
        "openai_throughput_vs_plain": round(1 / openai.ratio("ours", "plain"), 3),
        "trace_round_trip_ms": round(1000 * single.median("remote"), 2),
        "trace_in_process_ms": round(1000 * single.median("own"), 2),
        "trace_over_in_process_ms": round(single.difference_ms("remote", "own"), 2),
        "saves_gb_per_s": round(saved["fetched"], 2),
        "same_host_gb_per_s": round(saved["mapped"], 2),
        "attach_s": round(attach_s, 2),
        "seconds": {name: round(openai.median(name), 4) for name in openai.seconds},
        "requests_per_s": round(count / openai.median("ours"), 1),
        "prompts": count,
        "new_tokens": tokens,
        "rounds": repeat,
        "traces": traces,
        "saved_mb": saves_mb,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cpus": os.cpu_count(),
        "versions": {"vllm": pins.vllm_version(), "nnsight": pins.version_of("nnsight")},
    }


# -- servers --------------------------------------------------------------------------------------------


#: Of both servers: what is measured would be answered from the round before.
_UNCACHED = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")


def _flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def _plain_words(path: str, options: dict[str, Any]) -> list[str]:
    """VLLM's own server."""
    from vllm.platforms import current_platform  # vLLM decides what the platform is

    more = ["--enforce-eager"] if current_platform.is_cpu() else []
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={path}"),
        *(*_UNCACHED, *more, *_flags(options)),
    ]


@contextmanager
def _served(words: list[str], log: Path, environment: dict[str, str]) -> Iterator[str]:
    """A server that answers; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {
        "VLLM_PLUGINS": "",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words, "--host=127.0.0.1", f"--port={port}", f"--served-model-name={_NAME}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **more, **environment},
        )
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                cause = EngineLog(log).root_cause() or "it does not answer"
                raise EngineStartFailed(f"{' '.join(words[1:4])} did not start: {cause}.", cause=cause)
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


# -- the OpenAI side ------------------------------------------------------------------------------------


def _body(text: str, tokens: int) -> bytes:
    asked = {"model": _NAME, "prompt": text, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return json.dumps(asked).encode()


def openai_side(
    stack: ExitStack,
    servers: dict[str, tuple[str, str]],
    count: int,
    tokens: int,
    repeat: int,
    say: Callable[[str], None] = lambda text: None,
) -> rounds.Rounds:
    """The seconds of ``count`` completions on each server.

    Args:
        stack: Ends what is begun.
        servers: By name, address and token.
        count: How many, of as many prompts.
        tokens: New ones of each.
        repeat: Rounds that count.
        say: Told of each round.
    """
    bodies = [_body(text, tokens) for text in prompts(count)]
    works = {name: _Openai(stack, url, token, bodies).run for name, (url, token) in servers.items()}
    return rounds.run(works, repeat, warm_up=2, say=say)


class _Openai:
    """Clients that keep their connections, as OpenAI's do."""

    def __init__(self, stack: ExitStack, url: str, token: str, bodies: list[bytes]) -> None:
        split = urlsplit(url)
        self._bodies = bodies
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        self._threads = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        self._idle = [
            http.client.HTTPConnection(split.hostname or "", split.port, timeout=600) for _ in range(_AT_ONCE)
        ]
        for connection in self._idle:
            stack.callback(connection.close)

    def run(self) -> None:
        """All requests, as many at once as there are clients."""
        list(self._threads.map(self._one, self._bodies))

    def _one(self, body: bytes) -> None:
        connection = self._idle.pop()
        connection.request("POST", "/v1/completions", body, self._headers)
        answer = connection.getresponse()
        text = answer.read()
        self._idle.append(connection)
        if answer.status != http.client.OK:
            raise RuntimeError(f"a request failed: {text[:500]!r}")


# -- kernels --------------------------------------------------------------------------------------------


def attached(url: str, token: str) -> float:
    """Seconds in a new process, from its first import to the envoy tree."""
    done = subprocess.run(
        [sys.executable, "-c", _ATTACH.format(url=url)],
        env={**os.environ, "NNSIGHT_LAB_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=True,
    )
    return float(done.stdout)


def _attach(stack: ExitStack, name: str, url: str, token: str, **more: Any) -> RemoteEngine:
    engine = RemoteEngine(name, url, token, **more)
    engine.start()
    stack.callback(engine.stop)
    return engine


def _trace(engine: Engine) -> None:
    model = engine.model
    with engine.trace(prompts(1), max_tokens=1, temperature=0.0):
        last = model.model.layers[8].output[0][-1].save()
    assert len(last) == 1


def roads(
    engines: dict[str, RemoteEngine],
    nbytes: int,
    repeat: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """GB a second of each way home."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}

    def work(name: str) -> Callable[[], object]:
        return lambda: seconds[name].append(_road_s(engines[name], nbytes))

    rounds.run({name: work(name) for name in engines}, repeat, warm_up=2, say=say)
    return {name: nbytes / 1e9 / statistics.median(found[-repeat:]) for name, found in seconds.items()}


def _road_s(engine: RemoteEngine, nbytes: int) -> float:
    """Seconds of one way home, every page looked at."""
    before = engine._driver.home_s
    big = _save_large(engine, nbytes)
    began = time.perf_counter()
    assert int(big[::_PAGE_BYTES].sum()) == len(big[::_PAGE_BYTES])
    seconds = engine._driver.home_s - before + time.perf_counter() - began
    engine.saves.clear()
    return seconds


def _save_large(engine: RemoteEngine, nbytes: int) -> torch.Tensor:
    model: Any = engine.model
    ones: Any = torch.ones
    with engine.trace("One", max_tokens=1):
        model.model.layers[0].output[0].mean()
        big: torch.Tensor = ones(nbytes, dtype=torch.uint8).save()
    return big  # it is there only now

"""Property: whatever several users do at once, each of them gets what they get alone."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.server import user
from tests.server.conftest import TOKENS, Server
from tests.waiting import until

pytestmark = pytest.mark.engine

USERS = ("alice", "bob", "carol", "dan", "eve")

prompts = st.integers(0, len(user.PROMPTS) - 1)
# The same few names for everybody: that is the point.
names = st.sampled_from(["probe", "steer"])
actions = st.one_of(
    st.tuples(st.just("edit"), names, st.integers(1, 3)),
    st.tuples(st.just("clear"), names),
    st.tuples(st.just("trace"), prompts, st.integers(1, 3)),
    st.tuples(st.just("generate"), prompts, st.lists(names, unique=True, max_size=2)),
    st.tuples(st.just("complete"), prompts, st.integers(1, 3)),
    st.tuples(st.just("leave"), prompts),
    st.tuples(st.just("fail"), prompts),
    st.tuples(st.just("interrupt"), prompts),
    st.tuples(st.just("attach")),
)
# An edit first: a script without one looks at little.
scripts = st.tuples(
    st.tuples(st.just("edit"), names, st.integers(1, 3)), st.lists(actions, min_size=3, max_size=7)
).map(lambda parts: [parts[0], *parts[1]])


class Kernels:
    """Each user's kernel, started when first needed."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._started: dict[str, subprocess.Popen[str]] = {}

    def send(self, name: str, script: Any) -> None:
        """Have a user's script run."""
        kernel = self._kernel(name)
        assert kernel.stdin is not None
        kernel.stdin.write(json.dumps(script) + "\n")
        kernel.stdin.flush()

    def answer(self, name: str) -> Any:
        """What it gave."""
        kernel = self._kernel(name)
        assert kernel.stdout is not None
        line = kernel.stdout.readline()
        assert line, f"{name}'s kernel ended: {self._log(name).read_text(errors='replace')[-3000:]}"
        return json.loads(line)

    def close(self) -> None:
        """End them."""
        for kernel in self._started.values():
            kernel.communicate(timeout=60)

    def _kernel(self, name: str) -> subprocess.Popen[str]:
        if name not in self._started:
            command = [
                sys.executable,
                "-m",
                user.__name__,
                self._url,
                TOKENS[name],
                str(USERS.index(name) + 1),
            ]
            with self._log(name).open("w") as log:
                self._started[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
        return self._started[name]

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


@pytest.fixture(scope="module")
def kernels(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """The users'."""
    with contextlib.closing(Kernels(server.url, tmp_path_factory.mktemp("users"))) as found:
        yield found


def same(one: Any, other: Any) -> bool:
    """Whether two answers are, numbers that may differ in their last digits within those."""
    if isinstance(one, dict) and "near" in one and isinstance(other, dict):
        first, second = torch.tensor(one["near"]), torch.tensor(other["near"])
        return bool((first - second).norm() < 0.02 * first.norm())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(company=st.lists(scripts, min_size=2, max_size=len(USERS)))
def test_each_user_gets_in_company_what_they_get_alone(
    server: Server, kernels: Kernels, company: Any
) -> None:
    present = USERS[: len(company)]
    alone = []
    for name, script in zip(present, company, strict=True):
        kernels.send(name, script)
        alone.append(kernels.answer(name))
    for name, script in zip(present, company, strict=True):
        kernels.send(name, script)
    together = [kernels.answer(name) for name in present]
    for name, script, one, other in zip(present, company, alone, together, strict=True):
        for action, first, second in zip(script, one, other, strict=True):
            note(f"{name} {action}: alone {first}, in company {second}")
            assert same(first, second), f"{name}'s {action}"
    books = ("edits", "leases", "requests")
    until(
        lambda: not any(value for key, value in server.figures().items() if key in books),
        10,
        "something is left in the server's books",
    )

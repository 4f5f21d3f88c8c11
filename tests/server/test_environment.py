"""Where a block could look for a secret: the environment of the engine's processes, as `/proc` shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnsight_lab.server.environment import SECRETS
from tests.server.conftest import TOKENS

SECRET = "a-secret-of-some-length"
TAKES = """
import os
from pathlib import Path
from nnsight_lab.server.environment import take
taken = take(os.environ)
given = Path("/proc/self/environ").read_text()
print(sorted(taken.values()), "a-secret" in given, "KEPT=kept" in given, os.environ["KEPT"])
print([name for name in taken if name in os.environ or os.getenv(name)])
"""


def test_a_secret_is_written_over_where_proc_shows_it():
    environment = {**os.environ, **dict.fromkeys(SECRETS, SECRET), "KEPT": "kept"}
    done = subprocess.run(
        [sys.executable, "-c", TAKES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{[SECRET] * len(SECRETS)} False True kept", "[]"]


@pytest.mark.engine
def test_no_process_of_a_server_has_a_users_token(server):
    found = []
    for process in server.processes():
        given = Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
        found += [(process.name(), user) for user, token in TOKENS.items() if token in given]
    assert found == []

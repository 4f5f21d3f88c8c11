"""Runs all tests in two parts side by side, and once more the files of browsers and kernels that failed.

One part drives browsers and kernels, the other one engines in its own process: each waits for much of its
time, and two cores are enough for both. The first is shown as it runs, the other once it is done.

Tests of browsers and kernels share a machine with an engine, a server and a browser, and wait for all of
them: what fails twice has failed. Both runs are shown, so a test that needs the second is seen. Where any
other test failed there is no second run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(".pytest_cache")
PYTEST = [sys.executable, "-m", "pytest"]
WAITING = "browser or notebook"


def main() -> int:
    """The exit code of ``make test``."""
    shutil.rmtree(CACHE, ignore_errors=True)
    with tempfile.TemporaryFile() as printed:
        # Nobody waits at a screen for these: where both want a core, the others have it.
        command = ["nice", "-n", "5", *_part("others", f"not ({WAITING})")]
        others = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        try:
            codes = {"waiting": subprocess.call(_part("waiting", WAITING))}
        finally:
            codes["others"] = others.wait()
        printed.seek(0)
        sys.stdout.flush()
        shutil.copyfileobj(printed, sys.stdout.buffer)
        sys.stdout.flush()
    if codes["waiting"] != 0 and codes["others"] == 0:
        codes["waiting"] = _again()
    return max(codes.values())


def _part(name: str, marks: str) -> list[str]:
    return [*PYTEST, "-m", marks, "-o", f"cache_dir={CACHE / name}"]


def _again() -> int:
    failed = CACHE / "waiting" / "v" / "cache" / "lastfailed"
    files = sorted(
        {name.partition("::")[0] for name in json.loads(failed.read_text())} if failed.exists() else ()
    )
    if not files:
        return 1
    print(f"run again, whole: {', '.join(files)}", flush=True)
    return subprocess.call([*_part("again", WAITING), *files])


if __name__ == "__main__":
    sys.exit(main())

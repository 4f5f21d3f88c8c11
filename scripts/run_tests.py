"""Runs all tests in two parts side by side, and once more, alone, the files in which a test failed.

One part drives browsers and kernels, the other one engines in its own process: each waits for much of its
time, and two cores are enough for both. The first is shown as it runs, the other once it is done.

Tests that wait for a browser, a kernel or an engine share the machine with those of the other part, and with
whatever else it does: what fails in company and alone has failed. Both runs are shown, so a test that needs
the second is seen.
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
#: More than these fail for a reason that a second run does not take away.
MOST_FILES = 12
_FAILED = 1


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
    worst = max(codes.values())
    # Anything worse than a failed test is no test's doing.
    return _again() if worst == _FAILED else worst


def _part(name: str, marks: str) -> list[str]:
    return [*PYTEST, "-m", marks, "-o", f"cache_dir={CACHE / name}"]


def _again() -> int:
    files: set[str] = set()
    for part in ("waiting", "others"):
        failed = CACHE / part / "v" / "cache" / "lastfailed"
        if failed.exists():
            files.update(name.partition("::")[0] for name in json.loads(failed.read_text()))
    if not files or len(files) > MOST_FILES:
        return _FAILED
    print(f"run again, alone and whole: {', '.join(sorted(files))}", flush=True)
    return subprocess.call([*PYTEST, "-o", f"cache_dir={CACHE / 'again'}", *sorted(files)])


if __name__ == "__main__":
    sys.exit(main())

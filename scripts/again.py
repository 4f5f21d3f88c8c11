"""Runs the files again in which tests of a browser or a kernel failed; what fails twice has failed.

Such tests share a machine with an engine, a server and a browser, and wait for all of them. Both runs are
shown, so a test that needs the second is seen. Where any other test failed there is no second run.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """The exit code of the second run; 1 where there is none."""
    if not FAILED.exists():
        return 1
    files = sorted({name.partition("::")[0] for name in json.loads(FAILED.read_text())})
    outside = [file for file in files if not re.search(r"mark\.(browser|notebook)\b", Path(file).read_text())]
    if not files or outside:
        print(f"not run again: {', '.join(outside) or 'nothing failed by itself'}", flush=True)
        return 1
    print(f"run again, whole: {', '.join(files)}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", *files])


if __name__ == "__main__":
    sys.exit(main())

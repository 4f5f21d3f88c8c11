"""nnsight puts ``.save`` on every object; what cannot be imported after that is imported in any order."""

from __future__ import annotations

import subprocess
import sys

import pytest

AFTER = """
import anyio._backends._asyncio, anyio.streams.tls
assert [1].save is not None
"""


@pytest.mark.parametrize(
    "first",
    [
        "import nnsight_lab.blocks",
        "import nnsight_lab as lab\nimport nnsight\nimport nnsight_lab.blocks",
        "import nnsight\nimport nnsight_lab.blocks",
    ],
)
def test_nnsight_may_be_imported_before_and_after(first: str) -> None:
    program = f"{first}\nimport nnsight\n{AFTER}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]

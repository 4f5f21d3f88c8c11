"""A kernel of its own that does nothing but save, for tests that kill it: ``saving_kernel.py MODEL OPTIONS``.

It answers a line to each line it is told: ``save MB`` saves that much and checks the values, ``keep MB``
does so for ever and holds on to all of it, ``restart`` restarts its engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import nnsight_lab as lab


def save(engine: Any, megabytes: int) -> Any:
    """Save a row over and over, and see that it is that row everywhere."""
    model = engine.model
    times = megabytes * 10**6 // (128 * 4)
    with engine.trace("cats", max_tokens=1, temperature=0):
        row = model.model.layers[0].output[0][:1].save()
        many = row.repeat(times, 1).save()
    assert many.shape[0] == times
    assert bool((many == row).all())
    return many


def main(path: str, options: str) -> None:
    engine = lab.start(path, mode="sync", dtype="float32", max_model_len=256, **json.loads(options))
    print("ready", engine.id, flush=True)
    for line in sys.stdin:
        order, *rest = line.split()
        if order == "save":
            save(engine, int(rest[0]))
        elif order == "keep":
            kept = []
            while True:
                kept.append(save(engine, int(rest[0])))
        elif order == "restart":
            lab.restart()
        print("done", engine.id, flush=True)
    lab.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

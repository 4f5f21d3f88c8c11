"""What hundreds of requests under a saving edit leave behind in any process: nothing that adds up."""

from __future__ import annotations

import gc
import itertools
import statistics
from typing import Any

from nnsight_lab.bench import soak

#: Far less than what a request saves (10 kB), and less than one page of memory for each.
BYTES_A_REQUEST = 2_500


def test_requests_that_save_leave_no_memory_behind_in_any_process(engine: Any) -> None:
    saved_bytes = soak._install(engine)
    assert saved_bytes == 4 * 5 * 128 * 4  # four layers, five tokens, float32
    kept, engine.saves.max_requests = engine.saves.max_requests, 20

    def run(requests: int) -> None:
        # One by one: how a batch is split into steps is chance, and each new number of tokens costs once.
        for prompt in (soak._prompts(0) * requests)[:requests]:
            (output,) = engine.generate([prompt], edits=["all"], max_tokens=1, temperature=0.0)
            assert len(output.saves["streams"]) == 4

    try:
        run(300)
        looks, objects = [soak._look(engine, 0)], len(gc.get_objects())
        for done in range(150, 751, 150):
            run(150)
            looks.append(soak._look(engine, done))
        more = len(gc.get_objects()) - objects
    finally:
        engine.saves.max_requests = kept
        engine.saves.clear()
    # The kernel here is pytest's, which grows by itself: in it, what a request leaves would be an object.
    assert more < 300
    # A heap moves by some MB at once, up and down; what requests leave is there in every stretch.
    stretches = [soak.growth([one, two]) for one, two in itertools.pairwise(looks)]
    assert stretches[0].keys() == {"kernel", "EngineCore", "Worker", "slabs"}
    for name in ("EngineCore", "Worker", "slabs"):
        grown = [stretch[name]["bytes_per_request"] for stretch in stretches]
        assert statistics.median(grown) < BYTES_A_REQUEST, (name, grown)


def test_free_memory_of_a_cpu_worker_goes_back_to_the_system_when_asked(engine: Any) -> None:
    assert engine.rpc("lab_trim") == [True]

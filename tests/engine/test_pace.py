"""What finished calls say of the time of the next, and how an estimate reads; without an engine."""

from __future__ import annotations

import pytest

from nnsight_lab.engine.estimate import Estimate, Growths, NameBytes, Sample
from nnsight_lab.engine.pace import Pace, steps_of


def estimate(**changed) -> Estimate:
    plain = {
        "requests": 64,
        "prompt_tokens": 16_384,
        "new_tokens": 64,
        "saved_bytes": 570_000_000,
        "packed_bytes": 570_000_000,
        "seconds": 14.2,
        "budget_bytes": 6_000_000_000,
        "memory_budget_bytes": 5_800_000_000,
        "fits": True,
        "names": (),
        "how": "layers",
    }
    return Estimate(**{**plain, **changed})


def test_the_costs_of_tokens_and_steps_are_told_apart():
    pace = Pace()
    assert pace.seconds(100, 1, 0) is None
    for tokens, steps in [(400, 1), (8, 50), (300, 10), (1000, 1)]:
        pace.call(tokens, steps, 0.001 * tokens + 0.02 * steps)
    assert pace.seconds(2000, 30, 0) == pytest.approx(2.6)
    pace.home(10**9, 0.5)
    assert pace.seconds(2000, 30, 4 * 10**9) == pytest.approx(4.6)


def test_one_kind_of_call_alone_is_still_something():
    pace = Pace()
    pace.call(8, 1, 0.03)
    assert not pace.knows(10_000, 1)
    assert pace.seconds(8, 10, 0) == pytest.approx(0.3)
    pace.call(600, 1, 0.3)
    assert pace.knows(10_000, 1)
    assert not pace.knows(10_000, 20)
    assert pace.seconds(6000, 1, 0) == pytest.approx(3, rel=0.2)


def test_more_sequences_than_run_at_once_take_rounds():
    assert [steps_of(10, count, 4) for count in (1, 4, 5, 9)] == [10, 10, 20, 30]


def test_lines_go_through_what_was_measured():
    def saved(prompt: int, new: int) -> Sample:
        size = 100 + 8 * prompt + (0 if new == 1 else 64 * (new - 1))
        return Sample({"trace": size}, {("trace", "x"): size})

    sizes = [(32, 1), (64, 1), (32, 3), (32, 9)]
    growths = Growths.through({at: saved(*at) for at in sizes})
    assert growths.grows
    assert growths.blocks["trace"].at(1000, 200) == 100 + 8000 + 64 * 199
    # Past the third step this one saves nothing more.
    stops = {(p, n): Sample({"trace": 10 * min(n, 3)}, {}) for p, n in sizes}
    assert Growths.through(stops).blocks["trace"].at(500, 200) == 30
    assert not Growths.through(stops).grows


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {},
            "64 prompts, 16,384 tokens: 570 MB in about 14 s; fits in memory (5.8 GB left of save_budget)",
        ),
        (
            {"packed_bytes": 5_900_000_000, "saved_bytes": 5_900_000_000, "seconds": None},
            "64 prompts, 16,384 tokens: 5.9 GB; fits, 100 MB of it by disk (spill_budget)",
        ),
        (
            {"fits": False, "new_tokens": 640, "at_most": True},
            "64 prompts, 16,384 tokens and up to 640 new: at most 570 MB in about 14 s; does not fit "
            "(6 GB left of save_budget and spill_budget)",
        ),
        (
            {
                "saved_bytes": None,
                "fits": None,
                "unknown": "a probe failed with IndexError: 300",
            },
            "64 prompts, 16,384 tokens: not known, a probe failed with IndexError: 300",
        ),
        (
            {"how": "probe", "names": (NameBytes("trace", "x", 5000), NameBytes("probe", "y", 70))},
            "64 prompts, 16,384 tokens: 570 MB in about 14 s; fits in memory "
            "(5.8 GB left of save_budget)\nx (5 kB), probe.y (70 B)",
        ),
    ],
)
def test_an_estimate_reads_in_a_line_or_two(changed, text):
    assert str(estimate(**changed)) == text

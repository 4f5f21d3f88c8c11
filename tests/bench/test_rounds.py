from nnsight_lab.bench.rounds import Rounds, run


def test_a_ratio_is_the_median_of_the_ratios_within_a_round() -> None:
    # The machine is three times slower in the last round; the ratio does not see it.
    rounds = Rounds({"ours": (1.1, 1.1, 3.3), "plain": (1.0, 1.0, 3.0)})
    assert abs(rounds.ratio("ours", to="plain") - 1.1) < 1e-9
    assert abs(rounds.difference_ms("ours", to="plain") - 100) < 1e-6


def test_every_work_runs_once_a_round_and_the_order_rotates() -> None:
    seen: list[str] = []
    works = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    rounds = run(works, 3, warm_up=1)
    assert len(seen) == 12
    assert {tuple(seen[i : i + 3]) for i in (3, 6, 9)} == {("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")}
    assert all(len(values) == 3 for values in rounds.seconds.values())

from nnsight_lab.bench.soak import Sample, growth


def sample(requests: int, uss: int, slabs: int = 0) -> Sample:
    return Sample(requests, {"kernel": uss, "Worker": 5}, slabs, 0, 0)


def test_growth_is_counted_from_the_thousandth_request_on() -> None:
    found = growth(
        [sample(0, 0), sample(500, 10**9), sample(1000, 2 * 10**9), sample(3000, 2 * 10**9 + 4000)]
    )
    assert found["kernel"] == {"mb": 0.0, "bytes_per_request": 2.0}
    assert found["Worker"] == {"mb": 0.0, "bytes_per_request": 0.0}
    assert found["slabs"] == {"mb": 0.0, "bytes_per_request": 0.0}


def test_a_short_run_counts_from_its_first_look() -> None:
    found = growth([sample(0, 10**6), sample(100, 3 * 10**6, 64 * 10**6)])
    assert found["kernel"] == {"mb": 2.0, "bytes_per_request": 20000.0}
    assert found["slabs"]["mb"] == 64.0

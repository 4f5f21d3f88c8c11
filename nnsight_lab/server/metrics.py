"""The server's figures in Prometheus's words, beside vLLM's own on the same page.

They are read off the books when somebody asks, so nothing is paid for them until then. Users are told apart
by the label ``user``, the hundred who asked most by name and the rest together: a name for each of a
university's students would be a series for each, kept by Prometheus for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from vllm.v1.metrics.prometheus import get_prometheus_registry

from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.guard import REFUSALS

#: So many users have a label of their own.
NAMED = 100
OTHERS = "(others)"
_REASONS = {400: "bad request", 403: "forbidden", 404: "not found", 409: "conflict", 413: "too large",
            429: "over a limit", 503: "not ready"}  # fmt: skip


def tell(desk: Desk) -> None:
    """Put the figures of a server onto vLLM's page."""
    get_prometheus_registry().register(Figures(desk))


class Figures(Collector):
    """Reads the books of one server.

    Args:
        desk: Its.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def describe(self) -> Iterable[Any]:
        """Nothing: there may be no books yet when it is registered."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Every figure as it is now."""
        desk, ledger = self._desk, self._desk.ledger
        users = dict(ledger.usage.users)
        name = _names({user: used.requests + 1 for user, used in users.items()})
        yield _of_users(
            CounterMetricFamily, "requests", "Requests that ended.", name,
            {user: used.requests for user, used in users.items()},
        )  # fmt: skip
        tokens = CounterMetricFamily(
            "nnsight_lab_tokens", "Tokens of prompts, and generated.", labels=("user", "kind")
        )
        counted: dict[tuple[str, str], float] = defaultdict(float)
        for user, used in users.items():
            counted[name(user), "prompt"] += used.prompt_tokens
            counted[name(user), "generated"] += used.generated_tokens
        for labels, value in counted.items():
            tokens.add_metric(labels, value)
        yield tokens
        yield _of_users(
            CounterMetricFamily, "saved_bytes", "What blocks saved.", name,
            {user: used.saved_bytes for user, used in users.items()},
        )  # fmt: skip
        refused = CounterMetricFamily(
            "nnsight_lab_refused", "Requests that were refused.", labels=("user", "reason")
        )
        reasons: Counter[tuple[str, str]] = Counter()
        for (user, status), count in list(REFUSALS.items()):
            reasons[name(user), _REASONS.get(status, str(status))] += count
        for labels, count in reasons.items():
            refused.add_metric(labels, count)
        yield refused
        edits = Counter(edit.owner for edit in ledger.installed() if not edit.scoped)
        leases = Counter(lease.owner for lease in ledger.leases())
        for what, said, of_each in (
            ("running", "Sequences that run.", {user: desk.turns.taken(user) for user in users}),
            ("queued", "Requests that wait for their turn.", {u: desk.turns.waiting(u) for u in users}),
            ("edits", "Installed edits.", edits),
            ("leases", "Kernels that are attached.", leases),
        ):
            yield _of_users(GaugeMetricFamily, what, said, name, of_each)
        ran = desk.driver.steps.look()  # as last told: who scrapes does not wait for a worker
        if ran is not None and ran.graphs:
            steps = CounterMetricFamily("nnsight_lab_steps", "Steps of the engine.", labels=("kind",))
            steps.add_metric(("replayed",), ran.replayed)
            steps.add_metric(("replayed with taps",), ran.tapped)
            steps.add_metric(("module by module",), ran.eager)
            yield steps
        figures = ledger.figures()
        yield _one(GaugeMetricFamily, "kept_bytes", "Saves that wait to be fetched.", figures["kept_bytes"])
        yield _one(CounterMetricFamily, "forgotten", "Saves nobody fetched in time.", figures["forgotten"])
        yield _one(CounterMetricFamily, "engine_deaths", "Engines that died.", CONDITION.deaths)
        yield _one(GaugeMetricFamily, "ready", "Whether requests are taken.", CONDITION.state == "ready")


def _names(asked: Mapping[str, float]) -> Any:
    named = set(sorted(asked, key=lambda user: -asked[user])[:NAMED])
    return lambda user: user if user in named or len(asked) < NAMED else OTHERS


def _of_users(family: Any, what: str, said: str, name: Any, of_each: Mapping[str, float]) -> Any:
    found = family(f"nnsight_lab_{what}", said, labels=("user",))
    summed: dict[str, float] = defaultdict(float)
    for user, value in of_each.items():
        summed[name(user)] += value
    for user, value in summed.items():
        found.add_metric((user,), value)
    return found


def _one(family: Any, what: str, said: str, value: float) -> Any:
    return family(f"nnsight_lab_{what}", said, value=float(value))

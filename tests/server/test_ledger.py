"""The books of a shared engine: owners first, leases, counts and limits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nnsight_lab.errors import ServeRefused
from nnsight_lab.server.identity import Tokens, User
from nnsight_lab.server.ledger import Ledger
from nnsight_lab.server.limits import Limits, Refused
from nnsight_lab.wire.serving import LEASE_S, EditAsked

ALICE, BOB, ROOT = User("alice"), User("bob"), User("root", admin=True)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    found = Ledger(Limits(requests=3, edits=2, block_bytes=100, kept_bytes=100, kept_s=10), clock)
    for user in (ALICE, BOB, ROOT):
        found.open_lease(user, "kernel")
    return found


def edit(name="probe", edit_id="e1", **more):
    return EditAsked(edit_id, name, b"block", "kernel", **more)


def test_one_id_of_two_owners_is_two_edits(ledger):
    mine, theirs = ledger.add_edit(ALICE, edit()), ledger.add_edit(BOB, edit())
    assert mine.registration != theirs.registration
    assert ledger.named(ALICE, ["e1"]) == [mine]
    assert ledger.clear_edit(BOB, "e1") is theirs
    assert ledger.named(ALICE, ["e1"]) == [mine]
    with pytest.raises(Refused) as raised:
        ledger.named(BOB, ["e1"])
    assert raised.value.status == 404


def test_an_owner_cannot_spell_anothers_registration(ledger):
    sly = User("alice/e1")
    ledger.open_lease(sly, "kernel")
    registrations = {
        ledger.add_edit(ALICE, edit(edit_id="e1/x")).registration,
        ledger.add_edit(sly, edit(edit_id="x")).registration,
    }
    assert len(registrations) == 2


def test_an_owner_cannot_spell_anothers_lease_or_saves(ledger):
    sly = User("alice/x")
    ledger.open_lease(sly, "kernel")
    with pytest.raises(Refused):
        ledger.lease(ALICE, "x/kernel")
    assert ledger.end_lease("alice", "x/kernel") == []
    assert ledger.lease(sly, "kernel").owner == "alice/x"
    ledger.keep(sly, "r", "theirs", 10)
    with pytest.raises(Refused):
        ledger.kept(ALICE, "x/r")
    ledger.drop_kept(ALICE, "x/r")
    assert ledger.kept(sly, "r") == "theirs"


@pytest.mark.parametrize("name", ["", "trace", "a b", "../x", "x" * 101, "1st"])
def test_a_name_that_no_edit_can_have_is_refused(ledger, name):
    with pytest.raises(Refused, match="An edit cannot be called"):
        ledger.add_edit(ALICE, edit(name))


def test_only_a_traces_block_is_scoped(ledger):
    with pytest.raises(Refused):
        ledger.add_edit(ALICE, edit("probe", scoped=True))


def test_a_lease_that_was_let_go_of_is_told_when_it_is_renewed(ledger):
    assert not ledger.open_lease(ALICE, "kernel")
    ledger.end_lease("alice", "kernel")
    assert ledger.open_lease(ALICE, "kernel")


def test_an_edit_in_flight_stays_until_its_last_request(ledger):
    one = ledger.add_edit(ALICE, edit())
    ledger.hold([one])
    assert ledger.clear_edit(ALICE, "e1") is None
    with pytest.raises(Refused):
        ledger.named(ALICE, ["e1"])
    assert ledger.let_go([one]) == [one]
    assert ledger.figures()["edits"] == 0


def test_a_lease_that_nobody_renews_takes_all_with_it_but_what_is_published(ledger, clock):
    aborted = []
    ledger.lease(ROOT, "kernel").calls["c"] = lambda: aborted.append(1)
    gone, stays = ledger.add_edit(ROOT, edit()), ledger.add_edit(ROOT, edit("all", "e2"))
    ledger.publish(ROOT, "e2", True)
    clock.now += LEASE_S - 1
    ledger.open_lease(ALICE, "kernel")
    assert ledger.expired() == []
    clock.now += 2
    assert {lease.owner for lease in ledger.expired()} == {"bob", "root"}
    assert ledger.end_lease("root", "kernel") == [gone]
    assert aborted == [1]
    assert ledger.chosen(ALICE, None) == [stays]
    assert ledger.end_lease("root", "kernel") == []


def test_of_two_edits_with_one_name_the_later_runs(ledger):
    ledger.add_edit(ALICE, edit())
    later = ledger.add_edit(ALICE, edit(edit_id="e2"))
    assert ledger.chosen(ALICE, None) == [later]
    later.on = False
    assert ledger.chosen(ALICE, None) == []
    assert ledger.chosen(ALICE, ["probe"]) == [later]


def test_scoped_edits_are_nobodys_choice_and_count_against_no_limit(ledger):
    for number in range(5):
        ledger.add_edit(ALICE, edit("trace", f"s{number}", scoped=True))
    assert ledger.chosen(ALICE, None) == []
    with pytest.raises(Refused):
        ledger.chosen(ALICE, ["trace"])


@pytest.mark.parametrize(
    "names", [5, "probe", [5], [["probe"]], {"probe": 1}, True, [None], ["probe", "probe"]]
)
def test_what_is_no_list_of_names_is_refused(ledger, names):
    ledger.add_edit(ALICE, edit())
    with pytest.raises(Refused) as raised:
        ledger.chosen(ALICE, names)
    assert raised.value.status == 400


def test_limits(ledger):
    with pytest.raises(Refused, match="100 B is the most") as raised:
        ledger.add_edit(ALICE, EditAsked("big", "big", b"x" * 101, "kernel"))
    assert raised.value.status == 413
    ledger.begin(ALICE, 3)
    ledger.begin(BOB, 3)
    with pytest.raises(Refused) as raised:
        ledger.begin(ALICE)
    assert (raised.value.status, raised.value.retry_after_s) == (429, 1.0)
    ledger.end(ALICE, 3)
    ledger.begin(ALICE, 2)


def test_kept_saves_are_bounded_by_bytes_and_age(ledger, clock):
    for number in range(3):
        ledger.keep(ALICE, f"r{number}", number, 40)
    ledger.keep(BOB, "r0", "bob's", 90)
    with pytest.raises(Refused):
        ledger.kept(ALICE, "r0")
    assert (ledger.kept(ALICE, "r1"), ledger.kept(BOB, "r0")) == (1, "bob's")
    clock.now += 11
    ledger.sweep()
    assert (ledger.figures()["kept"], ledger.figures()["kept_bytes"]) == (0, 0)
    assert ledger.forgotten == 4
    ledger.keep(ALICE, "too much", "x", 101)  # it does not fit by itself
    ledger.keep(ALICE, "twice", 1, 60)
    ledger.keep(ALICE, "twice", 2, 60)
    assert (ledger.kept(ALICE, "twice"), ledger.figures()["kept_bytes"]) == (2, 60)


def test_short_tokens_are_refused():
    with pytest.raises(ServeRefused, match="at least 16 characters"):
        Tokens({"short": ALICE})


class Books(RuleBasedStateMachine):
    """Users install, run, clear and leave in any order: no edit is another's, and all comes to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = Ledger(Limits(edits=4), self.clock)
        self.users = [ALICE, BOB, ROOT]
        self.held: list[tuple[User, list]] = []

    @rule(who=st.integers(0, 2))
    def come(self, who):
        self.ledger.open_lease(self.users[who], "kernel")

    @rule(who=st.integers(0, 2), number=st.integers(0, 5), name=st.sampled_from("ab"))
    def install(self, who, number, name):
        try:
            found = self.ledger.add_edit(self.users[who], edit(name, f"e{number}"))
        except Refused:
            return
        assert found.owner == self.users[who].name

    @rule(who=st.integers(0, 2), names=st.none() | st.lists(st.sampled_from("abc"), max_size=2))
    def run(self, who, names):
        user = self.users[who]
        try:
            found = self.ledger.chosen(user, names)
        except Refused:
            return
        assert all(one.owner == user.name or one.published for one in found)
        self.ledger.begin(user)
        self.ledger.hold(found)
        self.held.append((user, found))

    @rule(number=st.integers(0, 5), published=st.booleans())
    def publish(self, number, published):
        try:
            self.ledger.publish(ROOT, f"e{number}", published)
        except Refused:
            return

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data):
        user, found = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.ledger.end(user)
        self.ledger.let_go(found)

    @rule(who=st.integers(0, 2), number=st.integers(0, 5))
    def clear(self, who, number):
        self.ledger.clear_edit(self.users[who], f"e{number}")

    @rule(who=st.integers(0, 2))
    def leave(self, who):
        self.ledger.end_lease(self.users[who].name, "kernel")

    @invariant()
    def held_edits_are_known(self):
        assert self.ledger.figures()["requests"] == len(self.held)
        assert all(one.in_flight > 0 for _, found in self.held for one in found)

    def teardown(self):
        while self.held:
            user, found = self.held.pop()
            self.ledger.end(user)
            self.ledger.let_go(found)
        for user in self.users:
            for one in [e for e in self.ledger.edits(user) if e.owner == user.name]:
                self.ledger.clear_edit(user, one.id)
            self.ledger.end_lease(user.name, "kernel")
        figures = self.ledger.figures()
        assert (figures["edits"], figures["leases"], figures["requests"]) == (0, 0, 0)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Whose part of the prefix cache a request reads and writes."""

from __future__ import annotations

import itertools

import pytest

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab.engine.prefixes import owner_of, refuse_long, salted
from nnsight_lab.errors import RequestRefused
from nnsight_lab.wire.touch import Reach, Touch

ANSWERS, PROMPT = Touch(Reach.ANSWERS), Touch(Reach.PROMPT)
ONE, TWO = Touch(Reach.ROWS, b"1" * 32), Touch(Reach.ROWS, b"2" * 32)


def salt(touches=(), owner="", given=None):
    found = salted({"prompt": "x"} | ({} if given is None else {"cache_salt": given}), touches, owner)
    return found.get("cache_salt")


def test_what_must_not_be_shared_never_has_the_same_salt():
    kinds = [(), (ONE,), (TWO,), (ONE, TWO), (TWO, ONE), (ONE, ONE)]
    owners, givens = ["", "alice", "bob", "ali"], [None, "ce", "alice", "x"]
    found = [salt(*of) for of in itertools.product(kinds, owners, givens)]
    assert len(set(found)) == len(found)
    assert salt((PROMPT,)) != salt((PROMPT,))
    assert salt((ONE, PROMPT)) != salt((ONE, PROMPT))


def test_what_may_be_shared_is():
    for owner, given in itertools.product(["", "alice"], [None, "x"]):
        plain = salt((), owner, given)
        assert salt((ANSWERS,), owner, given) == salt((ANSWERS, ANSWERS), owner, given) == plain
        assert salt((ANSWERS, ONE), owner, given) == salt((ONE,), owner, given)
    assert salt() is None
    assert salt(given="mine") == "mine"  # as in plain vLLM


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}, {"prompt_token_ids": [1, 2]}])
def test_every_form_of_a_prompt_is_salted_and_none_is_changed(prompt):
    before = dict(prompt) if isinstance(prompt, dict) else prompt
    found = salted(prompt, [PROMPT])
    assert found.pop("cache_salt").startswith("lab-")
    assert found == ({"prompt": "text"} if prompt == "text" else before)
    assert prompt == before


@pytest.mark.parametrize("given", [5, "", b"x"])
def test_a_salt_that_is_none_is_refused(given):
    with pytest.raises(RequestRefused, match="is a text that is not empty"):
        salted({"prompt": "x", "cache_salt": given}, [])


def test_whose_part_it_is():
    for code in (False, True):
        assert owner_of("alice", alone=True, shared=False, code=code) == ""
        assert owner_of("alice", alone=False, shared=False, code=code) == "alice"
    assert owner_of("alice", alone=False, shared=True, code=False) == ""
    assert owner_of("alice", alone=False, shared=True, code=True) == "alice"


def test_a_prompt_that_no_step_takes_is_refused_where_it_is_read():
    for reach in (None, Reach.ANSWERS, Reach.ROWS):
        refuse_long(101, 100, reach)
    for reach in (Reach.PROMPT, Reach.MIXED):
        refuse_long(100, 100, reach)
        refuse_long(101, 0, reach)
        with pytest.raises(RequestRefused, match=r"has 101 tokens.*max_num_batched_tokens=101"):
            refuse_long(101, 100, reach)

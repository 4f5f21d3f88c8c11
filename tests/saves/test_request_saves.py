"""What the blocks of a request saved, read by name."""

from __future__ import annotations

import pytest

from nnsight_lab.errors import AmbiguousSave, SaveNotFound
from nnsight_lab.saves.request import Saves


@pytest.fixture
def saves():
    return Saves({"low": {"hidden": 1, "norm": 2}, "high": {"hidden": 3}, "trace": {"norm": 4, "own": 5}})


def test_a_name_that_one_block_saved_is_read_directly(saves):
    assert saves["own"] == 5
    assert Saves({"low": {"hidden": 1}})["hidden"] == 1


def test_a_name_that_two_blocks_saved_says_how_to_read_each(saves):
    with pytest.raises(AmbiguousSave) as raised:
        saves["norm"]
    said = str(raised.value)
    assert said == "'norm' was saved by 2 blocks: read saves.edit('low')['norm'] or saves.trace['norm']."
    assert isinstance(raised.value, KeyError)


def test_each_blocks_saves_are_read_by_its_name(saves):
    assert saves.blocks == ("low", "high", "trace")
    assert saves.edit("low") == {"hidden": 1, "norm": 2}
    assert saves.edit("high") == {"hidden": 3}
    assert saves.trace == {"norm": 4, "own": 5}


def test_a_name_nobody_saved_names_the_nearest(saves):
    with pytest.raises(SaveNotFound, match=r"Nothing was saved as 'hiden'\. Did you mean 'hidden'\?"):
        saves["hiden"]
    with pytest.raises(SaveNotFound, match=r"Edit 'lo' did not run.*Did you mean 'low'\?"):
        saves.edit("lo")
    assert issubclass(SaveNotFound, KeyError)


def test_saves_are_a_mapping_of_every_name_once(saves):
    assert list(saves) == ["hidden", "norm", "own"]
    assert len(saves) == 3
    assert "norm" in saves
    assert "other" not in saves
    assert saves.get("other") is None
    assert saves.get("own") == 5


def test_a_name_that_is_not_ambiguous_alone_has_a_default(saves):
    # "norm" is there, twice: a default would hide both.
    with pytest.raises(AmbiguousSave):
        saves.get("norm")


def test_no_saves_are_an_empty_mapping():
    assert dict(Saves()) == {}
    assert Saves().trace == {}
    assert repr(Saves()) == "<Saves nothing>"


def test_saves_show_names_and_not_values(saves):
    assert repr(saves) == "<Saves low: hidden, norm; high: hidden; trace: norm, own>"


def test_saves_keep_what_they_were_given_when_that_changes():
    given = {"low": {"hidden": 1}}
    saves = Saves(given)
    given["low"]["hidden"] = 2
    assert saves["hidden"] == 1

"""What was appended step by step, joined into rows for positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_lab.runs.rows import Rows, rows_of


def joined(items: list[Any], prompt_count: int = 5) -> Rows:
    found = rows_of(items, prompt_count)
    assert isinstance(found, Rows), found
    return found


def test_a_number_a_step_begins_at_the_prompts_last_token() -> None:
    rows = joined([1, 2.5, True])
    assert rows.values.tolist() == [1, 2.5, 1]
    assert rows.first == 4


def test_a_vector_a_step_is_a_row_a_step() -> None:
    rows = joined([torch.arange(3.0), torch.ones(3)])
    assert rows.values.tolist() == [[0, 1, 2], [1, 1, 1]]
    assert rows.first == 4


def test_what_a_first_step_reads_of_the_whole_prompt_begins_at_the_first_token() -> None:
    rows = joined([torch.zeros(5, 3), torch.ones(1, 3)])
    assert rows.values.shape == (6, 3)
    assert rows.first == 0
    norms = joined([torch.zeros(5), torch.ones(1), torch.ones(1)])
    assert norms.values.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert norms.first == 0
    assert joined([torch.zeros(5)]).values.shape == (5,)  # the first look, before the second step


def test_one_column_is_one_number_a_position() -> None:
    assert joined([torch.zeros(5, 1), torch.ones(1, 1)]).values.shape == (6,)
    assert joined([torch.tensor(2.0), torch.tensor(3.0)]).values.tolist() == [2, 3]


def test_mixed_dtypes_keep_their_numbers() -> None:
    assert joined([torch.tensor([2**40, 1]), torch.tensor([0.5, 1.5])]).values.tolist() == [
        [2**40, 1],
        [0.5, 1.5],
    ]


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([], "nothing"),
        (["text"], "it holds str"),
        ([torch.zeros(1, 1, 1)], "it holds Tensor"),
        ([torch.zeros(2, dtype=torch.complex64)], "it holds Tensor"),
        ([torch.zeros(3), 1.0], "different numbers of dimensions"),
        ([torch.zeros(1, 3), torch.zeros(1, 4)], "different widths"),
    ],
)
def test_what_cannot_be_joined_says_why(items: list[Any], why: str) -> None:
    found = rows_of(items, 5)
    assert isinstance(found, str)
    assert why in found

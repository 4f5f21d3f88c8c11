"""Pieces of a look are sized by how long the worker was at the last ones."""

from __future__ import annotations

from nnsight_lab.engine.pieces import Pieces


def test_a_slow_worker_gets_smaller_pieces_and_a_fast_one_larger_ones():
    pieces = Pieces(flops=1e8, most=10_000, total=1_000)
    assert pieces.units == 100
    pieces.took(100, 4.0)
    assert pieces.units == 10
    pieces.took(10, 1e-6)
    assert pieces.units == 40, "no more than four times as many at once"
    for _ in range(20):
        pieces.took(pieces.units, 1e-6)
    assert pieces.units == 10_000


def test_a_piece_is_one_unit_at_the_least_and_no_more_than_a_message_holds():
    assert Pieces(flops=1e15, most=50, total=1).units == 1
    assert Pieces(flops=1, most=50, total=1).units == 50
    pieces = Pieces(flops=1, most=0, total=0)
    assert pieces.units == 1
    pieces.took(1, 100.0)
    assert pieces.units == 1


def test_the_share_that_is_done_is_told_after_each_piece():
    told = []
    pieces = Pieces(flops=1, most=4, total=10, progress=told.append)
    for _ in range(3):
        pieces.took(4, 0.1)
    assert told == [0.4, 0.8, 1.0]

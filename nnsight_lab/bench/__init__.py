"""Measurements, side by side with the peer in one run, as ratios.

Everything runs interleaved, round by round, because a machine's speed drifts by more than the
differences that matter: a plain engine alone was seen to drift 1.8 times in ten minutes. A figure is
the median over rounds of the ratio *within* a round.
"""

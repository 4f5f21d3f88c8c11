"""Figures of saved values: ``lab.plot.heatmap``, ``lines``, ``logit_lens``, ``compare`` and ``sweep``.

Each returns a plotly ``Figure``, never a ``FigureWidget``: a figure is drawn again from a saved notebook
without a kernel, and takes at most two megabytes of it. What a figure does not show one to one (gaps, blocks
of values in one cell, values outside the colours' range) it says in words.
"""

from __future__ import annotations

from nnsight_lab.plots.compare import compare
from nnsight_lab.plots.heatmap import heatmap
from nnsight_lab.plots.lines import lines
from nnsight_lab.plots.logit_lens import LensResult, logit_lens
from nnsight_lab.plots.sweep import sweep
from nnsight_lab.plots.theme import template

__all__ = ["LensResult", "compare", "heatmap", "lines", "logit_lens", "sweep", "template"]

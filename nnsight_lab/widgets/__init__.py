"""Views of saved values in a notebook: the browser draws, the kernel keeps the numbers."""

from nnsight_lab.widgets.attention import AttentionView
from nnsight_lab.widgets.browser import SavesBrowser
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.lens import LensView
from nnsight_lab.widgets.token_strip import TokenStrip

__all__ = ["AttentionView", "Heatmap", "LensView", "SavesBrowser", "TokenStrip"]

"""Views of saved values in a notebook: the browser draws, the kernel keeps the numbers."""

from nnsight_lab.widgets.browser import SavesBrowser
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.token_strip import TokenStrip

__all__ = ["Heatmap", "SavesBrowser", "TokenStrip"]

"""Views of saved values in a notebook: the browser draws, the kernel keeps the numbers."""

from nnsight_lab.widgets.browser import SavesBrowser
from nnsight_lab.widgets.heatmap import Heatmap

__all__ = ["Heatmap", "SavesBrowser"]

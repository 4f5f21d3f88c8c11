"""Views of saved values in a notebook: the browser draws, the kernel keeps the numbers."""

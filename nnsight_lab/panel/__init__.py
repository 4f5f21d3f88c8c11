"""What JupyterLab's side panel is told of this kernel, and what it may ask for.

The panel must never make a request wait, and must answer while a cell runs. So everything here is read from
what this process already knows, on the kernel's control thread or on a thread of this room's own; a worker is
never asked; and what takes long is begun, and its outcome is part of the next status.
"""

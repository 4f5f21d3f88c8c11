"""What a notebook sees: the cell forms `%%trace` and `%%edit`, `%engine`, `%edits`, completion, export.

The hard fact behind this room: a block can only be captured when the text Python compiled is the text
that `linecache` holds, line for line. So a cell form is an input transformer that keeps every line where
it is, never a classic cell magic that runs text of its own (there the block's source cannot be found, and
nothing can be awaited).

`extension` is the way in (`%load_ext nnsight_lab`); nothing is imported here, so that it stays light.
"""

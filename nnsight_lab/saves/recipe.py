"""The code that makes a saved value again, from its label alone.

A label knows the prompt, the sampling, the trace's block and the edits that ran, and nothing of the notebook
around them: names that a block read from there must be bound again. What comes out is Python that can be
pasted into a cell; a label of something that no block made has none.
"""

from __future__ import annotations

import tokenize
from io import StringIO

from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.wire.keys import TRACE_BLOCK

_INDENT = "    "


def recipe_of(label: SaveLabel, trace: str = "") -> str:
    """Python that runs the request again; "" where nothing is known of it.

    Args:
        label: Of what is to be made.
        trace: The block of the request's trace, where ``label`` is an edit's.
    """
    source = label.block_source if label.block == TRACE_BLOCK else trace
    edits = [(name, text) for name, _, text in label.edits if text.strip()]
    if not source.strip() and not edits:
        return ""
    parts = [f"with lab.edit({name!r}):\n{_body(text)}\n" for name, text in edits]
    options = [f"{name}={value!r}" for name, value in label.sampling.items()]
    options.append(f"edits={[name for name, _, _ in label.edits]!r}")
    call = ", ".join([repr(label.prompt), *options])
    if source.strip():
        parts.append(f"with lab.trace({call}) as tracer:\n{_body(source)}\n")
    else:
        parts.append(f"[output] = lab.generate({call})\n{label.name} = {_read_from(label)}\n")
    return "\n".join(parts)


def _body(source: str) -> str:
    """A block, indented; what is inside a string stays as it is."""
    lines = source.rstrip("\n").split("\n")
    inside = _inside_strings(source)
    return "\n".join(
        line if number in inside or not line.strip() else _INDENT + line
        for number, line in enumerate(lines, 1)
    )


def _inside_strings(source: str) -> set[int]:
    """The numbers of lines that begin inside a string."""
    found: set[int] = set()
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    try:
        for token in tokenize.generate_tokens(StringIO(source).readline):
            if token.type in strings:
                found.update(range(token.start[0] + 1, token.end[0] + 1))
    except (tokenize.TokenError, SyntaxError):  # no Python: shown as it is
        return set()
    return found


def _read_from(label: SaveLabel) -> str:
    of = f".outputs[{label.sequence}]" if label.sequence else ""
    return f"output{of}.saves.edit({label.block!r})[{label.name!r}]"

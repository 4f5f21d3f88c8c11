"""`%%trace` and `%%edit` as IPython knows them: for `%lsmagic`, `%%trace?` and completion of the names.

The transform has turned a cell of ours into Python before IPython looks for a magic of that name, so these
functions run only when another magic runs the cell's text, and then say so in one line.
"""

from __future__ import annotations

from typing import NoReturn

from nnsight_lab.errors import CellUsageError


def trace(line: str, cell: str = "") -> NoReturn:
    """Runs the cell's body inside one request per prompt, in the model's forward pass.

    %%trace "The Eiffel Tower is in", max_tokens=8, temperature=0
    hidden = model.model.layers[5].output[0].save()

    The first line's arguments are Python, as in a call:

        one prompt or several, a list of prompts, or none (with `with tracer.invoke(...):` in the body);
        any sampling setting of vLLM: max_tokens=, temperature=, top_p=, seed=, logprobs=, …;
        edits=["probe"]   the edits that these requests run; [] for none;
        show="tokens"     shows the tokens as they come, and not what was saved; "saves" the other way round;
        show=False        shows neither;
        estimate=True     says what the body would save and how long that takes, and does not run it;
        save_check=False  lets a call run whose saves would not fit;
        engine="name"     another engine than the current one.

    It may go on over several lines, in an open bracket or behind a backslash. What the body saves
    (`x.save()`) is bound in the notebook; `tracer.outputs` has vLLM's outputs. `await`s itself on an async
    engine. %%time and %%capture may stand above it.

    The same in plain Python: with lab.trace("The Eiffel Tower is in", max_tokens=8) as tracer:
    """
    raise _ran_by_another_magic("trace")


def edit(line: str, cell: str = "") -> NoReturn:
    """Leaves the cell's body on the engine, under a name, for every request that asks for it.

    %%edit probe
    hidden = model.model.layers[5].output[0].save()

    The first line is the edit's name, with or without quotes, or name=f"layer{n}"; `engine="name"` names
    another engine than the current one. Running the cell again replaces the edit. Requests choose edits by
    `edits=["probe"]`. `edit` is bound to the installed edit; `%edits` shows and switches them all.

    The same in plain Python: with lab.edit("probe") as (tracer, edit):
    """
    raise _ran_by_another_magic("edit")


def _ran_by_another_magic(name: str) -> CellUsageError:
    return CellUsageError(
        f"%%{name} works as the first line of a cell, where its block's source can be found; here another "
        f"magic ran it. Move it to a cell of its own (%%time and %%capture may stand above it)."
    )

"""What a module takes and gives, in words: one line for completion, a few for a tooltip.

The trap that these words are for: in vLLM most decoder layers return ``(hidden, residual)``, neither of
which is the residual stream, and most of their ``.input`` is positions. Shapes come from the model itself,
run without weights (`nnsight_lab.engine.dry_run`); where that says nothing, nothing is claimed.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from nnsight_lab.magics.envoys import (
    STEP,
    Reached,
    children,
    is_envoy,
    module_of,
    own_names,
    parent_of,
    root_of,
)

if TYPE_CHECKING:
    from nnsight_lab.engine.dry_run import Passed

#: Names of an envoy that say what goes through it.
_VALUES = ("output", "input", "inputs")
_LOGITS = "logits"
#: What of an envoy is asked for most.
_FIRST = (*_VALUES, _LOGITS, "samples", "skip", "source")
_TENSOR = ("save", "shape", "dtype", "clone", "mean", "norm", "float", "argmax", "topk", "softmax")
#: Parameters that a tooltip lists; a layer has a dozen.
_MOST = 12
_WIDE = 100


def known(root: Any, envoy: Any) -> Passed | None:
    """What goes through an envoy's module; None where that is not known."""
    from nnsight_lab.engine.dry_run import passed  # loads torch, which is there once there is an envoy

    top = module_of(root_of(root))
    module = module_of(envoy)
    try:
        return None if top is None or module is None else passed(top, module)
    except TypeError:  # not a module: a tree of another kind
        return None


def warm(model: Any) -> None:
    """Finds out what goes through a model before it is asked."""
    if is_envoy(model):
        known(model, model)


def members(reached: Reached, typed: str = "") -> list[tuple[str, str]]:
    """What may follow a path, each with one line about it: submodules first, then what every envoy has.

    Args:
        reached: Where the path leads.
        typed: What is typed of the next name. Before anything is, a module offers what is asked for most:
            JupyterLab sorts by name, and thirty names of nnsight's would hide the four of the model.
    """
    root, envoy, rest = reached
    if rest:
        return _of_value(form_of(reached))
    names = children(envoy)
    found = [(name, module_line(root, getattr(envoy, name))) for name in names]
    own = sorted((name for name in own_names(envoy) if name not in names), key=_by_use)
    if not typed and root_of(root) is not envoy:
        own = [name for name in own if name in _FIRST]
    return found + [(name, _own_line(root, envoy, name)) for name in own]


def module_line(root: Any, envoy: Any) -> str:
    """A module's class and its output: ``"LlamaMLP → [tokens, 576] bfloat16"``."""
    if not is_envoy(envoy):
        return "module"
    module = module_of(envoy)
    inside = _list_of(module)
    if inside:
        return inside
    passed = known(root, envoy)
    name = type(module).__name__
    return name if passed is None else f"{name} → {words(passed.output, _element_names(module, passed))}"


def form_of(reached: Reached) -> Any:
    """The form of the value that a path leads to, ``...`` where it is not known."""
    root, envoy, rest = reached
    value: Any = ...
    for number, step in enumerate(STEP.finditer(rest)):
        name, index = step["name"], step["index"]
        if not number:
            value = _value_named(root, envoy, name)
        elif name == "save" or name == "clone":
            continue
        elif isinstance(value, tuple) and index is not None and re.fullmatch(r"-?\d+", index.strip()):
            at = int(index)
            value = value[at] if -len(value) <= at < len(value) else ...
        elif isinstance(value, dict) and index is not None:
            value = value.get(index.strip("'\" "), ...)
        else:
            return ...
    return value


def tooltip(reached: Reached, typed: str, *, note: str = "") -> str:
    """The lines that Shift+Tab shows.

    Args:
        reached: Where a path leads.
        typed: The part of it that leads to the envoy, as the user has it or would.
        note: A line at the top, about a name that stands for the path.
    """
    root, envoy, rest = reached
    module = module_of(envoy)
    passed = known(root, envoy)
    path = _path(envoy, typed)
    lines = [note] if note else []
    first = STEP.match(rest)
    if first is not None:
        whole = f"{typed}{rest}".removesuffix(".save")
        form = form_of(reached)
        # Of a whole output the lines below say it, with names.
        if form is not ... and (first["name"] != "output" or rest.removesuffix(".save") != ".output"):
            whole = f"{whole}: {words(form)}"
        lines += [whole, ""]
    lines += [f"{path}: {type(module).__name__}{_which(envoy)}"]
    lines += _about_output(root, envoy, module, passed, typed)
    lines += _about_input(module, passed)
    if not rest:
        lines += _about_parameters(module)
        if children(envoy):
            lines.append(_field("Modules", ", ".join(children(envoy))))
    if any("[tokens" in line for line in lines):
        lines += ["", "tokens: this request's in this step; its prompt's at first, then one at a time"]
    return "\n".join(lines)


def words(form: Any, names: tuple[str, ...] = ()) -> str:
    """A form in words: ``"(hidden, residual) [tokens, 576] bfloat16 each"``."""
    if isinstance(form, dict):
        return f"{{{', '.join(f'{name}: {words(value)}' for name, value in form.items())}}}"
    if not isinstance(form, tuple):
        return str(form)
    if names and len(set(form)) == 1:
        return f"({', '.join(names)}) {form[0]} each"
    parts = [
        f"{names[index]} {words(part)}" if index < len(names) and part is not None else words(part)
        for index, part in enumerate(form)
    ]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _about_output(root: Any, envoy: Any, module: Any, passed: Passed | None, typed: str) -> list[str]:
    inside = _list_of(module)
    if inside:
        return [_field("Holds", inside), _field("Example", f"{typed}[{len(module) // 2}].output")]
    top = module_of(root_of(root))
    whole = known(root, root_of(root)) is not None
    if passed is None and whole and typed.endswith("lm_head"):
        return [_field("Output", "none of its own: it runs within the logits. Read model.logits")]
    if passed is None:
        return [_field("Output", "not known before it has run")]
    names = _element_names(module, passed)
    lines = [_field("Output", words(passed.output, names))]
    layer = _is_decoder_layer(top, envoy, module)
    if names == ("hidden", "residual"):
        lines.append(_more("a fused pair: the residual stream is its sum, neither of the two"))
        example = f"stream = lab.residual({typed}.output).save()"
    elif names == ("normed", "residual"):
        lines.append(
            _more("output[0] is what the norm gives; output[1] the residual stream that it was given")
        )
        example = f"normed = {typed}.output[0].save()"
    elif isinstance(passed.output, tuple):
        example = f"{_variable(typed)} = {typed}.output[0].save()"
    elif layer:
        lines.append(_more("the residual stream itself"))
        example = f"stream = {typed}.output.save()"
    else:
        example = f"{_variable(typed)} = {typed}.output.save()"
    return [*lines, _field("Example", example)]


def _about_input(module: Any, passed: Passed | None) -> list[str]:
    if passed is None:
        return []
    names = _argument_names(module, passed)
    every = [(f"inputs[0][{at}]", names[at], form) for at, form in enumerate(passed.args)]
    every += [(f'inputs[1]["{name}"]', name, form) for name, form in passed.kwargs.items()]
    if not every:
        return []
    _, name, form = every[0]
    lines = [_field("Input", f"{name} {words(form)}")]
    if len(every) > 1:
        lines.append(_more("the first of its inputs:"))
        width = max(len(place) for place, _, _ in every)
        lines += [_more(f"{place:{width}}  {name} {words(form)}") for place, name, form in every]
    return lines


def _about_parameters(module: Any) -> list[str]:
    from nnsight_lab.engine.dry_run import shape_of  # loads torch, which is there once there is an envoy

    found = [(name, shape_of(value)) for name, value in getattr(module, "named_parameters", lambda: ())()]
    lines = [
        _field("Weights" if not number else "", f"{name} {shape}")
        for number, (name, shape) in enumerate(found[:_MOST])
    ]
    if len(found) > _MOST:
        lines = [_field("Weights", f"{len(found)} parameters, of its {len(list(module.children()))} parts")]
    return lines


def _of_value(form: Any) -> list[tuple[str, str]]:
    if form is ... or form is None:
        return []
    if isinstance(form, tuple | dict):
        return [("save", words(form))]
    return [(name, words(form) if name == "save" else "tensor") for name in _TENSOR]


def _by_use(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _own_line(root: Any, envoy: Any, name: str) -> str:
    form = _value_named(root, envoy, name)
    if form is ...:
        return "method" if callable(getattr(type(envoy), name, None)) else "property"
    if name == "output":
        passed = known(root, envoy)
        return words(form, _element_names(module_of(envoy), passed) if passed else ())
    return words(form)


def _value_named(root: Any, envoy: Any, name: str | None) -> Any:
    """The form of a value of an envoy by its name, ``...`` where there is none or it is not known."""
    top = root_of(root)
    if name == _LOGITS and envoy is top:
        processor = getattr(module_of(top), "logits_processor", None)
        passed = None if processor is None else known(root, top.logits_processor)
        return ... if passed is None else passed.output
    passed = known(root, envoy) if name in _VALUES else None
    if passed is None:
        return ...
    if name == "output":
        return passed.output
    if name == "inputs":
        return (passed.args, dict(passed.kwargs))
    return next(iter([*passed.args, *passed.kwargs.values()]), ...)


def _element_names(module: Any, passed: Passed) -> tuple[str, ...]:
    """What the elements of an output are called, where they have names."""
    output = passed.output
    if not isinstance(output, tuple):
        return ()
    if hasattr(module, "quant_method") and len(output) == 2:
        return ("output", "bias")
    if len(output) == 2 and output[0] == output[1] and "residual" in _parameters(module):
        return ("normed" if "Norm" in type(module).__name__ else "hidden", "residual")
    return ()


def _argument_names(module: Any, passed: Passed) -> list[str]:
    names = list(_parameters(module))
    return [names[at] if at < len(names) else f"argument {at}" for at in range(len(passed.args))]


def _parameters(module: Any) -> list[str]:
    # vLLM's layers with a kernel per device have `forward(*args, **kwargs)`; this one says what they take.
    forward = getattr(type(module), "forward_native", None) or getattr(type(module), "forward", None)
    try:
        return [] if forward is None else list(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return []


def _is_decoder_layer(top: Any, envoy: Any, module: Any) -> bool:
    from nnsight_lab.errors import LensRefused
    from nnsight_lab.lens.anatomy import anatomy  # loads torch

    above, _, last = str(envoy.__dict__.get("path", "")).rpartition(".")
    parent = parent_of(envoy)
    if not last.isdigit() or not is_envoy(parent):
        return False
    try:
        return anatomy(top, len(module_of(parent))).layers == above.partition(".")[2]
    except LensRefused:
        return False


def _list_of(module: Any) -> str:
    """What a list of modules holds; nothing for a module that runs."""
    if type(module).__name__ != "ModuleList" or not len(module):
        return ""
    kinds = list(dict.fromkeys(type(part).__name__ for part in module))
    return f"{len(module)} × {' or '.join(kinds[:3])}"


def _which(envoy: Any) -> str:
    last = str(envoy.__dict__.get("path", "")).rpartition(".")[2]
    parent = parent_of(envoy) if last.isdigit() else None
    return f", one of {len(module_of(parent))}" if is_envoy(parent) else ""


def _path(envoy: Any, typed: str) -> str:
    path = envoy.__dict__.get("path")
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", path) if isinstance(path, str) else typed


def _variable(typed: str) -> str:
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[[^\[\]]*\]", "", typed))
    # Not the model's own name: the example would bind it anew.
    return "hidden" if names[-1] == names[0] else str(names[-1])


def _field(name: str, text: str) -> str:
    return f"{name:8} {text}" if len(text) < _WIDE else f"{name:8} {text[: _WIDE - 1]}…"


def _more(text: str) -> str:
    return _field("", text)

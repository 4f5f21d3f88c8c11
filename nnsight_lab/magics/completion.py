"""Completion in `%%trace` and `%%edit` cells, and on `%engine`, `%edits` and
`%saves` lines.

The kernel's own completion knows the user's variables, and so the envoys of a model; it knows neither
`tracer` and `edit`, which the header binds, nor names bound in the body. The hard fact behind this file:
jedi knows them all once it is given the cell as the Python it becomes, with the cursor moved as far as the
text was (`reading`). The model's own tree is not jedi's: its paths are followed for real, and each name
comes with what it is in the place of its type, which is all that the kernel's protocol has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from nnsight_lab.magics.commands import EDITS_FORMS, ENGINE_FORMS, SAVES_FORMS
from nnsight_lab.magics.contract import lab
from nnsight_lab.magics.describe import members
from nnsight_lab.magics.envoys import before_dot, bindings, reach, replaced
from nnsight_lab.magics.reading import BOUND_NAMES, bound_class, interpreter_of, members_of
from nnsight_lab.magics.transform import INDENT, BodyPosition, body_position

#: The public fields of vLLM's `SamplingParams` (0.26 to 0.33) that a notebook sets.
SAMPLING_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "extra_args",
)
#: What our own header adds to them.
TRACE_OPTIONS = ("edits", "show", "engine", "live", "estimate", "save_check", "save_budget")
EDIT_OPTIONS = ("name", "engine")
#: What `%engine start` is most often given: ours, then vLLM's.
START_OPTIONS = (
    "name",
    "mode",
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "quantization",
    "kv_cache_dtype",
    "trust_remote_code",
    "revision",
    "seed",
)
_OPTION_VALUES = {
    "mode": ("auto", "sync", "async"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "enforce_eager": ("True", "False"),
}
_LIMIT = 300


class CellMatcher:
    """Completes inside a cell of ours."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.matcher = _named("nnsight_lab.cell", self._match)

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        lines = context.full_text.splitlines(keepends=True)
        body = body_position(lines)
        if body is None or context.cursor_line >= body.line:
            tree = self._in_tree(context, lines[: context.cursor_line] if body else [])
            if tree:
                return _result(context.token, tree, suppress=True) | {"ordered": True}
        if body is None:
            return _nothing()
        in_header = context.cursor_line < body.line
        try:
            found = self._in_header(context, body) if in_header else self._in_body(context, lines, body)
        except Exception:  # jedi raises on some half-written text; other matchers still answer
            return _nothing()
        return _result(context.token, found, suppress=not in_header and bool(found))

    def _in_tree(self, context: CompletionContext, above: Sequence[str]) -> list[_Found]:
        """What follows a path in the model's tree, with what each of it is; `above` binds names to paths."""
        before = context.line_with_cursor[: context.cursor_position]
        path = before_dot(before)
        reached = None if path is None else reach(replaced(path, bindings(above)), self._shell.user_ns)
        if reached is None:
            return []
        found = members(reached, before.rpartition(".")[2])
        # JupyterLab breaks the column of types at spaces, and lines then lie over one another.
        return [_Found(name, about.replace(" ", "\u00a0"), python=True) for name, about in found]

    def _in_body(self, context: CompletionContext, lines: list[str], body: BodyPosition) -> list[_Found]:
        name = before_dot(context.line_with_cursor[: context.cursor_position])
        if name in BOUND_NAMES and name not in bindings(lines[: context.cursor_line]):
            return [_Found(text, sort, python=True) for text, sort in members_of(bound_class(name))]
        typed = lines[context.cursor_line] if context.cursor_line < len(lines) else ""
        if not typed.strip():
            # An empty line is not indented by the transform, so jedi would be past the block's scope.
            lines = [*lines[: context.cursor_line], " " * context.cursor_position + "_\n"]
        interpreter = interpreter_of(lines, body, self._shell.user_ns)
        names = interpreter.complete(context.cursor_line + 1, context.cursor_position + len(INDENT))
        return [
            _Found(name.name, name.type, python=True)
            for name in names[:_LIMIT]
            if not name.name.startswith("_") or context.token.rpartition(".")[2].startswith("_")
        ]

    def _in_header(self, context: CompletionContext, body: BodyPosition) -> list[_Found]:
        before = context.line_with_cursor[: context.cursor_position]
        if before.startswith("%%") and len((before + "_").split(None, 1)) < 2:
            return []  # still the magic's own name
        if _in_quotes(before):
            return [_Found(name, "edit") for name in _edit_names()] if "edits" in before else []
        if "." in context.token:
            return []
        options = SAMPLING_OPTIONS + TRACE_OPTIONS if body.kind == "trace" else EDIT_OPTIONS
        return [_Found(f"{option}=", "param") for option in options]


class LineMatcher:
    """Completes `%engine`, `%edits` and `%saves` lines, in any cell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.matcher = _named("nnsight_lab.line", self._match)

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        before = context.line_with_cursor[: context.cursor_position].lstrip()
        words = before.split()
        if not words or (len(words) == 1 and not before.endswith((" ", "\t"))):
            return _nothing()
        current = "" if before.endswith((" ", "\t")) else words[-1]
        earlier = words[1:-1] if current else words[1:]
        if words[0] in ("%engine", "engine") and _is_magic(context, words[0], self._shell):
            found = _engine_words(earlier, current)
        elif words[0] in ("%edits", "edits") and _is_magic(context, words[0], self._shell):
            found = _edits_words(earlier)
        elif words[0] in ("%saves", "saves") and _is_magic(context, words[0], self._shell):
            if earlier and earlier[0] in ("write", "read") and len(earlier) == 1:
                return _nothing()  # a path: IPython's own
            found = _saves_words(earlier)
        else:
            return _nothing()
        return _result(context.token, found, suppress=True)


class _Found(NamedTuple):
    text: str
    type: str
    python: bool = False


def _engine_words(earlier: Sequence[str], current: str) -> list[_Found]:
    if not earlier:
        return [_Found(action, "magic") for action in ENGINE_FORMS]
    if earlier[0] == "start":
        option, equals, _ = current.partition("=")
        if equals:
            return [_Found(value, "value") for value in _OPTION_VALUES.get(option, ())]
        if len(earlier) == 1:
            return [_Found("demo", "model")]
        given = {word.partition("=")[0] for word in earlier}
        options = [_Found(f"{option}=", "param") for option in START_OPTIONS if option not in given]
        return [*options, _Found("--restart", "param")]
    if earlier[0] in ("status", "stop", "restart", "sleep", "wake", "log") and len(earlier) == 1:
        return [_Found(name, "engine") for name in _engine_names()]
    return []


def _edits_words(earlier: Sequence[str]) -> list[_Found]:
    if not earlier:
        return [_Found(action, "magic") for action in EDITS_FORMS]
    if earlier[0] not in EDITS_FORMS:
        return []
    names = [_Found(name, "edit") for name in _edit_names() if name not in earlier]
    if list(earlier) == ["default"]:
        return [*names, _Found("all", "param"), _Found("none", "param")]
    return [*names, _Found("--all", "param")] if list(earlier) == ["clear"] else names


def _saves_words(earlier: Sequence[str]) -> list[_Found]:
    if not earlier:
        return [_Found(action, "magic") for action in SAVES_FORMS]
    if earlier[0] not in ("write", "keep", "drop"):
        return []
    requests = [_Found(name, "request") for name in _request_ids() if name not in earlier]
    return [*requests, _Found("all", "param")] if list(earlier) == ["drop"] else requests


def _request_ids() -> list[str]:
    package = lab()
    return package.get_engine().saves.ids()[:_LIMIT] if package.engines() else []


def _engine_names() -> list[str]:
    return list(lab().engines())


def _edit_names() -> list[str]:
    package = lab()
    try:
        return [edit.name for edit in package.get_engine().edits] if package.engines() else []
    except Exception:  # a dead engine has no names to offer, and Tab must stay silent
        return []


def _named(identifier: str, function: Callable[[CompletionContext], SimpleMatcherResult]) -> Any:
    """A matcher as IPython's completer takes it."""

    def matcher(context: CompletionContext) -> SimpleMatcherResult:
        return function(context)

    return context_matcher(identifier=identifier)(matcher)


def _nothing() -> SimpleMatcherResult:
    return {"completions": [], "suppress": False}


def _result(token: str, found: Iterable[_Found], *, suppress: bool) -> SimpleMatcherResult:
    """The found names that go on from the token; each replaces the whole token.

    IPython's tokens end at spaces, quotes, brackets and `=`, but not at dots: of `model.lay`, a name of
    Python's goes on from `lay`, and an edit's name could have the dot in it.
    """
    completions = []
    for name in found:
        fragment = token.rpartition(".")[2] if name.python else token
        if name.text.startswith(fragment):
            kept = token[: len(token) - len(fragment)]
            completions.append(SimpleCompletion(text=kept + name.text, type=name.type))
    return {"completions": completions, "suppress": suppress and bool(completions)}


def _in_quotes(before: str) -> bool:
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1


def _is_magic(context: CompletionContext, word: str, shell: InteractiveShell) -> bool:
    """Whether the word is a magic here: with its `%`, or without one where no variable has the name."""
    return word.startswith("%") or (shell.automagic and word not in shell.user_ns)

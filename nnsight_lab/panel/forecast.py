"""How many saves a cell will make, and about how many bytes, before it runs.

For a cell as it is typed, so nothing may be run for it: its block is read (see `reading`), prompts are
counted by a copy of the tokenizer (the notebook's own may be in use just then), and the engine is not asked.
What cannot be told so is said to be unknown, and `%%trace …, estimate=True` measures it.
"""

from __future__ import annotations

import ast
import copy
import textwrap
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import nnsight_lab
from nnsight_lab.errors import LabError
from nnsight_lab.magics import header as headers
from nnsight_lab.magics.scanner import split_lines
from nnsight_lab.magics.transform import indented
from nnsight_lab.panel.described import Anatomy, Plain, Several, Value
from nnsight_lab.panel.reading import Counted, Reader, Request, TooMuch, Work
from nnsight_lab.wire import panel as wire

#: vLLM's own, where nothing is said.
_MAX_TOKENS = 16
#: So much of a prompt is counted; the rest is taken to be alike.
_COUNTED = 20_000
#: So many prompts are counted one by one; more are taken to be like these.
_PROMPTS = 64
#: An edit's requests are not known yet: two lengths tell what it saves of each token.
_SHORT, _LONG = 8, 24


class Forecasts:
    """Tells of cells what they would save.

    Args:
        namespace: The notebook's.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._tokenizer: tuple[str, Any] = ("", None)
        self._anatomy: tuple[str, Anatomy | None] = ("", None)

    def of(self, cell: str) -> wire.PanelForecast | None:
        """What a cell would save; None where that cannot be told, or the cell is none of ours.

        Raises:
            LabError: Its first line cannot be read, or there is no engine.
        """
        lines = split_lines(cell)
        place = headers.find(lines)
        if place is None:
            return None
        header = headers.read(lines, place)
        try:
            body = ast.parse("".join(["if 1:\n", *indented(lines[header.last + 1 :], "    ")])).body
            call = ast.parse(f"f({header.arguments})", mode="eval").body
        except (SyntaxError, ValueError):  # still being typed
            return None
        assert isinstance(call, ast.Call)
        block = body[0].body if body and isinstance(body[0], ast.If) else []
        work = Work()
        try:
            engine = self._engine(call)
            if engine.state()[0] not in (wire.READY, wire.BUSY, wire.ASLEEP):
                return None
            with self._lock:
                if header.kind == "edit":
                    return self._edit(engine, block, work)
                return self._trace(engine, call, block, work)
        except (TooMuch, RecursionError):
            return None

    def _engine(self, call: ast.Call) -> Any:
        named = next((keyword.value for keyword in call.keywords if keyword.arg == "engine"), None)
        name = named.value if isinstance(named, ast.Constant) else None
        if isinstance(named, ast.Name):
            found = self._namespace.get(named.id)
            name = found if isinstance(found, str) else getattr(found, "name", None)
        return nnsight_lab.get_engine(name if isinstance(name, str) else None)

    # -- edits ---------------------------------------------------------------------------------

    def _edit(self, engine: Any, block: Sequence[ast.stmt], work: Work) -> wire.PanelForecast:
        short, long = (self._read(engine, block, Request(tokens, 1), work) for tokens in (_SHORT, _LONG))
        later = self._read(engine, block, Request(_SHORT, 2), work)
        per_token, base = 0, -1
        if short.nbytes is not None and long.nbytes is not None:
            per_token = (long.nbytes - short.nbytes) // (_LONG - _SHORT)
            base = short.nbytes - per_token * _SHORT
        return wire.PanelForecast(
            saves=short.saves,
            of_edits=0,
            requests=0,
            bytes=base,
            token_bytes=per_token,
            at_most=short.at_most,
            at_least=short.at_least,
            each_step=later.saves > short.saves,
        )

    def _read(
        self,
        engine: Any,
        block: Sequence[ast.stmt],
        request: Request,
        work: Work,
        invoked: Any = None,
    ) -> Counted:
        # `model` is the engine's, whatever the notebook calls its own.
        namespace = {"model": engine.model, "engine": None, **self._namespace}
        return Reader(self._anatomy_of(engine), namespace, request, work, invoked).read(block)

    # -- traces --------------------------------------------------------------------------------

    def _trace(
        self, engine: Any, call: ast.Call, block: Sequence[ast.stmt], work: Work
    ) -> wire.PanelForecast | None:
        values = Reader(self._anatomy_of(engine), self._namespace, Request(0, 1), work)
        settings: dict[str | None, Value] = {
            keyword.arg: values.value(keyword.value) for keyword in call.keywords if keyword.arg
        }
        estimating = settings.get("estimate")
        if isinstance(estimating, Plain) and estimating.value:
            return None
        prompts = _prompts([values.value(argument) for argument in call.args])
        chosen = self._edits(engine, settings.get("edits"))
        total, of_edits = Counted(), Counted()
        sequences = _whole(settings.get("n"), 1)

        def request(prompt: Any, own: Mapping[str | None, Value]) -> Request:
            tokens = self._tokens(engine, prompt)
            room = max(1, engine._context() - tokens)
            asked = own.get("max_tokens", own.get("max_new_tokens"))
            unlimited = isinstance(asked, Plain) and asked.value is None
            return Request(tokens, room if unlimited else min(_whole(asked, _MAX_TOKENS), room))

        if prompts is None or (not prompts and not call.args):
            invokes: list[Request] = []

            def invoked(inner: ast.Call, reader: Reader) -> Request | None:
                given = _prompts([reader.value(argument) for argument in inner.args])
                own: dict[str | None, Value] = dict(settings)
                own.update((one.arg, reader.value(one.value)) for one in inner.keywords)
                found = request(given[0], own) if given else None
                invokes.append(found or Request(_SHORT, 1))
                return found

            if call.args:  # prompts that a call makes, say: of each request as of an edit
                return self._edit(engine, block, work)
            total.add(self._read(engine, block, Request(0, 1), work, invoked), sequences)
            requests = invokes
        else:
            requests = [request(prompt, settings) for prompt in prompts[:_PROMPTS]]
            counts: dict[tuple[int, int], Counted] = {}
            for one in requests:
                key = (one.tokens, one.steps)
                if key not in counts:
                    counts[key] = self._read(engine, block, one, work)
                total.add(counts[key], sequences)
            if len(prompts) > len(requests):
                factor = len(prompts) / len(requests)
                total.saves = round(total.saves * factor)
                total.nbytes = None if total.nbytes is None else round(total.nbytes * factor)
        for edit in chosen:
            source = ast.parse(textwrap.dedent(edit.source)).body
            for one in requests:
                of_edits.add(self._read(engine, source, one, work), sequences)
        own_saves = total.saves
        total.add(of_edits)
        ignored = settings.get("ignore_eos")
        stops = total.grows and not (isinstance(ignored, Plain) and ignored.value)
        return wire.PanelForecast(
            saves=own_saves + of_edits.saves,
            of_edits=of_edits.saves,
            requests=len(prompts) if prompts else len(requests),
            bytes=-1 if total.nbytes is None else total.nbytes,
            token_bytes=0,
            at_most=total.at_most or stops,
            at_least=total.at_least,
            each_step=False,
        )

    def _edits(self, engine: Any, asked: Value | None) -> list[Any]:
        """The edits the cell's requests would run, as far as their names are known."""
        names = None
        if isinstance(asked, Several):
            names = [item.value for item, _ in asked.items if isinstance(item, Plain)]
        try:
            versions = engine.edits.chosen(names)
        except LabError:  # said when the cell runs
            return []
        return list(versions)

    # -- the model -----------------------------------------------------------------------------

    def _anatomy_of(self, engine: Any) -> Anatomy:
        if self._anatomy[0] != engine.id or self._anatomy[1] is None:
            from nnsight_lab.lens import anatomy as lens  # torch, which a kernel without an engine has not

            known = engine.facts()
            try:
                layers = f"model.{lens.anatomy(engine.model._module, engine._layer_count()).layers}"
            except LabError:
                layers = ""
            self._anatomy = (
                engine.id,
                Anatomy(known.hidden, known.vocabulary, known.itemsize, layers),
            )
        found = self._anatomy[1]
        assert found is not None
        return found

    def _tokens(self, engine: Any, prompt: Any) -> int:
        if not isinstance(prompt, str):
            return len(prompt)
        if self._tokenizer[0] != engine.id:
            self._tokenizer = (engine.id, copy.deepcopy(engine.tokenizer))
        tokens = len(self._tokenizer[1](prompt[:_COUNTED])["input_ids"])
        return round(tokens * len(prompt) / _COUNTED) if len(prompt) > _COUNTED else tokens


def _prompts(arguments: Sequence[Value]) -> list[Any] | None:
    """Texts and lists of token ids; None where one of them is not known."""
    found: list[Any] = []
    given: Sequence[Value] = arguments
    if len(arguments) == 1 and isinstance(arguments[0], Several):
        items = [item for item, times in arguments[0].items for _ in range(times)]
        given = arguments if items and all(_is_number(item) for item in items) else items
    for argument in given:
        if isinstance(argument, Plain) and isinstance(argument.value, str):
            found.append(argument.value)
        elif isinstance(argument, Several) and all(_is_number(item) for item, _ in argument.items):
            found.append([0] * len(argument.items))
        elif isinstance(argument, Several) and isinstance(prompt := argument.get("prompt"), Plain):
            found.append(str(prompt.value))
        elif isinstance(argument, Several) and isinstance(ids := argument.get("prompt_token_ids"), Several):
            found.append([0] * len(ids.items))
        else:
            return None
    return found


def _is_number(value: Value) -> bool:
    return isinstance(value, Plain) and isinstance(value.value, int)


def _whole(value: Value | None, otherwise: int) -> int:
    found = value.value if isinstance(value, Plain) else None
    return found if isinstance(found, int) and found > 0 else otherwise

"""What a cell is said to save before it runs, beside what it then saves: with a real engine."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nnsight_lab.panel.actions import Actions
from nnsight_lab.panel.forecast import Forecasts
from nnsight_lab.panel.surroundings import Surroundings
from nnsight_lab.wire import panel as wire
from tests.waiting import CAT, TOWER

LONG = "a prompt that is somewhat longer than the others, " * 3
CELLS = {
    "one value": "%%trace TOWER, max_tokens=1\nhidden = model.model.layers[2].output[0].save()",
    "a whole output": '%%trace "cats", max_tokens=1\nhidden = model.model.layers[2].output.save()',
    "a stream": "%%trace TOWER, max_tokens=1\nx = lab.residual(model.model.layers[-1].output)[-1].save()",
    "every layer": (
        "%%trace TOWER, max_tokens=1\nrows = [lab.residual(l.output)[-1] for l in model.model.layers].save()"
    ),
    "a loop over layers": (
        "%%trace TOWER, max_tokens=1\nrows = [].save()\nfor i in range(1, 4):\n"
        "    rows.append(model.model.layers[i].mlp.output.mean(0))"
    ),
    "every step": (
        "%%trace TOWER, max_tokens=7, ignore_eos=True\nrows = list().save()\n"
        "for step in tracer.all():\n    rows.append(model.model.layers[1].output[0][-1])"
    ),
    "some steps and layers": (
        "%%trace TOWER, max_tokens=6, ignore_eos=True\nrows = [].save()\nfor step in tracer.iter[1:4]:\n"
        "    for layer in model.model.layers[:2]:\n        rows.append(layer.output[1])"
    ),
    "logits of every step": (
        "%%trace TOWER, max_tokens=4, ignore_eos=True\nlogits = [].save()\n"
        "for step in tracer.iter[:]:\n    logits.append(model.logits)"
    ),
    "several prompts": (
        "%%trace PROMPTS, max_tokens=1\na = model.model.layers[0].output[0].save()\n"
        "b = model.model.layers[1].self_attn.output[0].save()"
    ),
    "invokes": (
        "%%trace max_tokens=1\nfor prompt in PROMPTS:\n    with tracer.invoke(prompt):\n"
        "        h = model.model.layers[0].output[0].save()"
    ),
    "two samples": (
        "%%trace TOWER, n=2, temperature=1, max_tokens=1\nh = model.model.layers[0].output[1].save()"
    ),
    "a stack": (
        "%%trace TOWER, max_tokens=1\n"
        "x = torch.stack([l.output[0] for l in model.model.layers]).float().save()"
    ),
    "an assigned dictionary": (
        "%%trace TOWER, max_tokens=1\nd = {}.save()\nfor i, layer in enumerate(model.model.layers):\n"
        "    d[i] = layer.output[0].norm(dim=-1)"
    ),
    "a marked item of a list that is not": (
        "%%trace TOWER, max_tokens=1\nrows = []\nrows.append(model.model.layers[0].output[0].save())\npass"
    ),
    "a name that is bound again": (
        "%%trace TOWER, max_tokens=1\nfor layer in model.model.layers:\n    h = layer.output[0].save()"
    ),
    "a projection": "%%trace TOWER, max_tokens=1\n"
    "q = model.model.layers[0].self_attn.qkv_proj.output[0].save()",
}


SAVES = {
    "one value": 1,
    "a whole output": 2,
    "a stream": 1,
    "every layer": 4,
    "a loop over layers": 3,
    "every step": 7,
    "some steps and layers": 6,
    "logits of every step": 4,
    "several prompts": 6,
    "invokes": 3,
    "two samples": 2,
    "a stack": 1,
    "an assigned dictionary": 4,
    "a marked item of a list that is not": 0,
    "a name that is bound again": 1,
    "a projection": 1,
}


@pytest.fixture
def namespace(engine: Any) -> dict[str, Any]:
    import torch

    import nnsight_lab as lab

    return {
        "model": engine.model,
        "lab": lab,
        "torch": torch,
        "TOWER": TOWER,
        "PROMPTS": [TOWER, CAT, LONG],
    }


@pytest.fixture
def known(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    import nnsight_lab

    monkeypatch.setattr(nnsight_lab, "get_engine", lambda name=None: engine)
    return engine


def saved_by(engine: Any, shell: InteractiveShell, cell: str) -> tuple[int, int]:
    """Runs a cell; how many values came home, and their bytes."""
    engine.saves.clear()
    ran = shell.run_cell(cell)
    assert ran.success, cell
    labels = [label for request in engine.saves.ids() for label in engine.saves.labels(request)]
    return len(labels), sum(label.bytes for label in labels)


@pytest.fixture
def shell(namespace: dict[str, Any], known: Any) -> Any:
    shell = InteractiveShell.instance()
    shell.user_ns.update(namespace)
    shell.run_line_magic("load_ext", "nnsight_lab")
    yield shell
    shell.run_line_magic("unload_ext", "nnsight_lab")
    InteractiveShell.clear_instance()


def test_a_cell_saves_as_many_values_and_about_as_many_bytes_as_was_said(
    known: Any, shell: InteractiveShell, namespace: dict[str, Any]
) -> None:
    forecasts = Forecasts(namespace)
    wrong = {}
    for what, cell in CELLS.items():
        told = forecasts.of(cell)
        saves, nbytes = saved_by(known, shell, cell)
        close = told is not None and nbytes / 2 <= told.bytes <= nbytes * 2
        assert saves == SAVES[what], what
        if told is None or told.saves != saves or not close or told.at_most or told.at_least:
            wrong[what] = (told, saves, nbytes)
    assert not wrong


def test_what_is_not_certain_is_said(known: Any, namespace: dict[str, Any]) -> None:
    def told(cell: str) -> wire.PanelForecast:
        found = Forecasts(namespace).of(cell)
        assert found is not None, cell
        return found

    rows = "rows = [].save()\nfor s in tracer.all():\n    rows.append(model.model.layers[1].output[0])"
    early = told(f"%%trace TOWER, max_tokens=5\n{rows}")
    assert (early.saves, early.at_most, early.at_least) == (5, True, False)
    assert told(f"%%trace TOWER\n{rows}").saves == 16  # vLLM's own max_tokens
    some = told("%%trace TOWER\nif unknown():\n    h = model.model.layers[0].output[0].save()")
    assert (some.saves, some.at_most) == (1, True)
    more = told(
        "%%trace TOWER\nrows = [].save()\nwhile go():\n    rows.append(model.model.layers[0].output[0])"
    )
    assert (more.saves, more.at_least) == (1, True)
    opaque = told("%%trace TOWER\nh = probe(model.model.layers[0].output[0]).save()")
    assert (opaque.saves, opaque.bytes) == (1, -1)
    edit = told("%%edit probe\nh = model.model.layers[0].output[0].save()")
    assert (edit.saves, edit.requests, edit.bytes, edit.token_bytes) == (1, 0, 0, 512)
    edit = told(f"%%edit probe\n{rows}")
    assert edit.each_step
    assert told("%%trace make_prompts()\nh = model.model.layers[0].output[0].save()").requests == 0


def test_edits_that_the_requests_run_are_counted_too(known: Any, namespace: dict[str, Any]) -> None:
    model = known.model
    with known.edit("probe"):
        deep = model.model.layers[3].output[0].save()  # noqa: F841
    forecasts = Forecasts({**namespace, "some": ["probe"]})
    cell = "%%trace TOWER, max_tokens=1{}\nh = model.model.layers[0].output[0].save()"
    known.saves.clear()
    both = forecasts.of(cell.format(""))
    assert both is not None
    assert (both.saves, both.of_edits, both.bytes) == (2, 1, 2 * 16 * 512)
    for asked, of_edits in ((", edits=[]", 0), (", edits=some", 1), (', edits=["probe"]', 1)):
        found = forecasts.of(cell.format(asked))
        assert found is not None
        assert found.of_edits == of_edits, asked
    known.edits["probe"].switch_off()
    found = forecasts.of(cell.format(""))
    assert found is not None
    assert found.of_edits == 0


def test_nothing_of_a_cell_is_run_and_what_cannot_be_told_is_not(
    known: Any, namespace: dict[str, Any]
) -> None:
    ran: list[str] = []

    class Trap:
        def __getattribute__(self, name: str) -> Any:
            ran.append(name) if not name.startswith("__") else None
            return object.__getattribute__(self, name)

        def __getitem__(self, key: Any) -> Any:
            ran.append("item")
            raise AssertionError

        __call__ = __iter__ = __len__ = __add__ = __bool__ = __eq__ = __getitem__  # type: ignore[assignment]
        __hash__ = None  # type: ignore[assignment]

    forecasts = Forecasts({**namespace, "trap": Trap(), "huge": list(range(10**6))})
    calls: list[Any] = []
    known._driver.submit, submit = calls.append, known._driver.submit
    try:
        for cell in (
            "%%trace TOWER\nx = trap.y\nz = [t for t in trap].save()\nif trap == 1:\n    trap[0](trap + 1)",
            "%%trace trap, max_tokens=trap\nx = len(trap).save()",
            "%%trace TOWER\nfor i in range(10**9):\n    x = model.model.layers[0].output[0].save()",
            "%%trace TOWER\nx = [[[0] * 10**9] * 10**9] * 10**9\ny = 10**10**10\nz = 'a' * 10**12",
            "%%trace huge\nx = [i for i in huge].save()",
            "%%trace TOWER, estimate=True\nx = model.model.layers[0].output[0].save()",
            "%%trace TOWER\nx = model.model.layers[99].output[0].save()\ny = model.nothing.output.save()",
            "%%trace TOWER\nx = (",
            "%%trace TOWER\n",
            "x = 1",
        ):
            forecasts.of(cell)
    finally:
        known._driver.submit = submit
    assert ran == calls == []
    assert forecasts.of("%%trace TOWER\nx = (") is None
    assert forecasts.of("x = 1") is None
    answer = Actions(Surroundings(), namespace).take(
        {wire.ACTION: wire.FORECAST, wire.CELL: CELLS["a stack"]}
    )
    assert answer["forecast"]["saves"] == 1
    answer = Actions(Surroundings(), namespace).take(
        {wire.ACTION: wire.FORECAST, wire.CELL: "%%trace x = = 1\nx"}
    )
    assert not answer["ok"]

from __future__ import annotations

from typing import Any

import pytest

from tests.magics import fakes


@pytest.fixture
def complete(shell: Any) -> Any:
    from IPython.core.completer import provisionalcompleter

    def complete_at(marked: str) -> list[str]:
        """What is offered at the `|`, as the text that would stand before the cursor's word."""
        cell, at = marked.replace("|", "", 1), marked.index("|")
        with provisionalcompleter():
            found = list(shell.Completer.completions(cell, at))
        return [cell[completion.start : at][:0] + completion.text for completion in found]

    return complete_at


@pytest.fixture
def model(shell: Any) -> fakes.Model:
    shell.user_ns["model"] = fakes.Model("demo")
    model: fakes.Model = shell.user_ns["model"]
    return model


@pytest.mark.parametrize(
    ("cell", "offered"),
    [
        ("%%trace 'a'\ntracer.sto|", "stop"),
        ("%%trace 'a'\ntra|", "tracer"),
        ("%%edit probe\nedit.switch_o|", "switch_on"),
        ("%%edit probe\ned|", "edit"),
        ("%%edit probe\nhidden_rows = model.layers\nif True:\n    hid|", "hidden_rows"),
        ("%%edit probe\ns = 'abc'\ns.upp|", "upper"),
        ("%%edit probe\nmodel.lay|", "layers"),
        ("%%edit probe\n    |", "tracer"),
        ("%%edit probe\n|", "edit"),
        ("%%trace 'half-written, max_tok\ntracer.sto|", "stop"),
        ("%%trace [\n'a',\n'b'], n=2\ntracer.sto|", "stop"),
        ("%%time\n%%trace 'a'\ntracer.sto|", "stop"),
        ("# why\n%%trace 'a'\ny = 1\ntracer.sto|\nz = 2\n", "stop"),
    ],
)
def test_the_body_knows_tracer_edit_and_its_own_names(
    complete: Any, model: Any, cell: str, offered: str
) -> None:
    assert any(text.rpartition(".")[2] == offered for text in complete(cell))


def test_the_body_offers_what_the_engines_own_tracer_has(complete: Any, lab: fakes.Lab) -> None:
    lab.start("demo")
    assert any("invoked" in text for text in complete("%%trace 'a'\ntracer.invok|"))


@pytest.mark.parametrize(
    ("cell", "offered"),
    [
        ("%%trace 'a', max_t|", "max_tokens="),
        ("%%trace |", "edits="),
        ("%%trace 'a', |\nx = 1\n", "temperature="),
        ("%%edit na|", "name="),
        ("%%trace ['a',\n'b'], temp|\nx\n", "temperature="),
        ("%%trac|", "%%trace"),
        ("%%ed|", "%%edit"),
        ("%engine sta|", "start"),
        ("%engine start demo max_m|", "max_model_len="),
        ("%engine start demo dtype=bf|", "bfloat16"),
        ("%engine start demo --re|", "--restart"),
        ("%engine start d|", "demo"),
        ("x = 1\n%engine stop ma|", "main"),
        ("%saves wr|", "write"),
        ("%saves drop lab-|", "lab-1a"),
        ("%saves drop a|", "all"),
        ("%saves write file |", "lab-1a"),
        ("%edits o|", "off"),
        ("%edits on |", "probe-2.1"),
        ("%edits on probe-2.|", "probe-2.1"),
        ("%%trace 'a', edits=['pro|", "probe-2.1"),
    ],
)
def test_first_lines_and_line_magics_offer_their_options(
    complete: Any, lab: fakes.Lab, cell: str, offered: str
) -> None:
    engine = lab.start("demo")
    engine.edits.known["probe-2.1"] = fakes.Edit(engine, "probe-2.1")
    engine.saves.put("lab-1a", [{"trace": {"x": 1}}])
    assert offered in complete(cell)


def test_other_cells_complete_as_before(complete: Any, model: Any) -> None:
    assert any(text.endswith("layers") for text in complete("model.lay|"))
    assert "max_tokens=" not in complete("max_t|")
    assert not any(text == "tracer" for text in complete("trac|"))


class Envoy:
    """As nnsight's: children by attribute and index, values only inside a block."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return Envoy(self.__dict__["_module"]._modules[name])

    def __getitem__(self, index: int) -> Any:
        return Envoy(list(self._module._modules.values())[index])

    @property
    def output(self) -> Any:
        raise ValueError("Cannot access `output` outside of interleaving")


@pytest.fixture
def tree(shell: Any) -> Any:
    import torch

    layer = torch.nn.ModuleDict({"self_attn": torch.nn.Identity(), "mlp": torch.nn.Identity()})
    shell.user_ns["model"] = Envoy(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer, layer])}))
    return shell


@pytest.mark.parametrize(
    ("cell", "offered"),
    [
        ("%%trace 'a'\nx = model.layers[1].ml|", "mlp"),
        ("%%edit p\nmodel.layers[0].self|", "self_attn"),
        ("%%edit p\nmodel.layers[0].|", "mlp"),
        ("model.layers[-1].out|", "output"),
    ],
)
def test_a_path_goes_on_behind_a_subscript(complete: Any, tree: Any, cell: str, offered: str) -> None:
    assert any(text.rpartition(".")[2] == offered for text in complete(cell))


@pytest.mark.parametrize(
    "typed", ["model.layers[7].", "model.layers[0].output.", "nothing[0].", "model.nope.", "3."]
)
def test_a_path_that_leads_nowhere_offers_nothing(tree: Any, typed: str) -> None:
    from nnsight_lab.magics.describe import members
    from nnsight_lab.magics.envoys import before_dot, reach

    path = before_dot(typed)
    reached = None if path is None else reach(path, tree.user_ns)
    assert reached is None or members(reached) == []


@pytest.mark.parametrize(
    "cell",
    [
        "%%edit p\nlayer = model.layers[1]\nlayer.|",
        "%%edit p\nfor layer in model.layers:\n    layer.|",
        "%%edit p\nfor i, layer in enumerate(model.layers):\n    layer.|",
        "%%edit p\nfor i in range(2):\n    model.layers[i + 1].|",
        "%%edit p, {\nlayer = model.layers[1]\nx = (layer.|",
        "model.layers[0].|",
    ],
)
def test_a_name_that_the_body_binds_to_a_path_goes_on_as_the_path(
    complete: Any, tree: Any, cell: str
) -> None:
    assert any(text.rpartition(".")[2] == "mlp" for text in complete(cell))


def test_a_name_that_is_bound_below_the_cursor_is_none_yet(complete: Any, tree: Any) -> None:
    assert not any(text.endswith("mlp") for text in complete("%%edit p\nlayer.|\nlayer = model.layers[1]"))


def test_before_a_name_is_begun_a_module_offers_what_is_asked_for_most(complete: Any, tree: Any) -> None:
    offered = {text.rpartition(".")[2] for text in complete("%%edit p\nmodel.layers[1].|")}
    assert offered == {"self_attn", "mlp", "output"}

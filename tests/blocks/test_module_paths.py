"""Where a saved value was read, from the text of its block alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.blocks.module_paths import module_paths, roots_of


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("h = model.model.layers[3].output[0].save()", {"h": "model.layers[3].output[0]"}),
        ("h = save(m.lm_head.input)", {"h": "lm_head.input"}),
        (
            "h = model.model.layers[3].output[0][:, -1].clone().save()",
            {"h": "model.layers[3].output[0][:, -1]"},
        ),
        ("h = lab.residual(model.model.layers[15].output).save()", {"h": "model.layers[15].output"}),
        ("h = model.model.layers[i + 1].output", {"h": "model.layers[*].output"}),
        ("h = []\nfor i in range(3):\n    h.append(model.layers[i].output[0])", {"h": "layers[*].output[0]"}),
        ("h = []\nfor layer in model.layers:\n    h += [layer.mlp.output]", {"h": "layers[*].mlp.output"}),
        (
            "h = {}\nfor i, each in enumerate(model.layers[:4]):\n    h[i] = each.output",
            {"h": "layers[*].output"},
        ),
        ("h = [x.output[0] for x in model.layers].save()", {"h": "layers[*].output[0]"}),
        ("h = {i: x.output for i, x in enumerate(model.layers)}.save()", {"h": "layers[*].output"}),
        ("h = [model.layers[0].output, model.layers[1].output]", {"h": "layers[*].output"}),
        ("with tracer.iter[:3]:\n    h = model.head.output[-1].argmax(-1).save()", {"h": "head.output[-1]"}),
        ("if x:\n    h = model.a.output.save()", {"h": "a.output"}),
        ("layer = model.layers[4]\nh = layer.attn.output[0].save()", {"h": "layers[4].attn.output[0]"}),
        (
            "a = model.layers[2].output\nh = (a[0] + 1).save()",
            {"a": "layers[2].output", "h": "layers[2].output[0]"},
        ),
        ("a, b = model.layers[2].output\nb.save()", {"a": "layers[2].output", "b": "layers[2].output"}),
        ("a, b = model.x.output, model.y.output", {"a": "x.output", "b": "y.output"}),
        (
            "model.layers[0].output[0][:] = 0\nh = model.layers[1].output[0, :, 5]",
            {"h": "layers[1].output[0, :, 5]"},
        ),
        ("h = model.a.output + model.b.output", {}),
        ("h = torch.ones(3)\nv = h.output", {}),
        ("h = model.a.output\nh = 1", {}),
        ("h = model.layers.weight.save()", {}),
        ("def f():\n    h = model.a.output", {}),
        ("h = (", {}),
        ("", {}),
    ],
)
def test_a_path_is_read_off_the_text(source: str, paths: dict[str, str]) -> None:
    assert dict(module_paths(source)) == paths


class Envoy:
    """As nnsight's: knows its path."""

    def __init__(self, path: str) -> None:
        self.path = path


class Engine:
    pass


def test_names_that_are_modules_are_known_and_others_are_not() -> None:
    roots = roots_of(
        {"m": Envoy("model"), "layer": Envoy("model.model.layers.3"), "x": 3}, {"e": Engine()}, engines=Engine
    )
    source = "a = m.lm_head.output\nb = layer.mlp.output\nc = e.model.n.output\nd = x.output\nf = y.a.input"
    assert dict(module_paths(source, roots)) == {
        "a": "lm_head.output",
        "b": "model.layers[3].mlp.output",
        "c": "n.output",
    }


class Sly:
    """Answers to any name, or raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_looking_for_modules_touches_no_other_value() -> None:
    assert roots_of({"x": Sly()}) == ()


@given(
    st.lists(
        st.sampled_from(
            [
                *"abh=.[](){}:,*+ \n",
                "model",
                ".output",
                ".input",
                "for ",
                " in ",
                "if ",
                "    ",
                "lambda ",
                "h.append(",
            ]
        ),
        max_size=30,
    )
)
@settings(max_examples=300, deadline=None)
def test_no_text_makes_it_raise(parts: list[str]) -> None:
    found = module_paths("".join(parts))
    assert all(isinstance(path, str) for path in found.values())


def test_a_text_that_is_too_deep_or_too_long_has_no_paths() -> None:
    assert module_paths("h = " + "(" * 50 + "model.a.output" + ")" * 50) == {"h": "a.output"}
    assert module_paths("h = model.a.output" + "[0]" * 100_000) == {}
    assert module_paths("h = " + "-" * 20_000 + "1") == {}

"""A block whose list was not saved though its items were: said, and only where it is certain."""

from __future__ import annotations

import ast

import pytest

from nnsight_lab.blocks.unkept import unkept


def named(block: str, kept: tuple[str, ...] = ()) -> list[str]:
    return [line.split("'")[1] for line in unkept(ast.parse(block).body, kept)]


@pytest.mark.parametrize(
    "block",
    [
        "xs = [layer.output.save() for layer in layers]",
        "xs = [a.output.save(), b.output.save()]",
        "xs = (a.output.save(), b.output.save())",
        "xs = {n: layer.output.save() for n, layer in enumerate(layers)}",
        "xs = {'a': a.output.save()}",
        "xs = [[head.output.save() for head in layer] for layer in layers]",
        "xs: list = [layer.output.save() for layer in layers]",
        "xs = []\nfor layer in layers:\n    xs.append(layer.output.save())",
        "xs = list()\nfor layer in layers:\n    h = layer.output.save()\n    xs.append(h)",
        "xs = []\nfor layer in layers:\n    xs += [layer.output.save()]",
        "xs = {}\nfor n, layer in enumerate(layers):\n    xs[n] = layer.output.save()",
        "xs = dict()\nxs.update(a=a.output.save())",
        "xs = [nnsight.save(layer.output) for layer in layers]",
        "for step in tracer.all():\n    xs.append(model.logits.save())",  # a list of an earlier cell
        "with tracer.invoke('a'):\n    xs = [layer.output.save() for layer in layers]",
        "a = b.output.save()\nxs = [a, a]",
    ],
)
def test_a_list_of_saved_items_that_is_not_saved_is_named(block: str) -> None:
    assert named(block) == ["xs"]
    assert named(block + "\nxs.save()") == []
    assert named(block + "\nxs = xs.save()") == []
    assert named(block + "\nnnsight.save(xs)") == []
    assert named(block, kept=("xs",)) == []


@pytest.mark.parametrize(
    "block",
    [
        "x = layer.output.save()",
        "xs = [layer.output for layer in layers].save()",
        "xs = [layer.output.save() for layer in layers].save()",
        "xs = list().save()\nfor layer in layers:\n    xs.append(layer.output.save())",
        "xs = [layer.output for layer in layers]",
        # meant for what is made of them
        "xs = [layer.output.save() for layer in layers]\nstacked = torch.stack(xs).save()",
        "xs = []\nxs.append(a.output.save())\nn = len(xs)",
        # the whole name is another thing now
        "xs = [a.output.save()]\nxs = 3",
        "model.layers[3].output[0][:] = other.output.save()",
        "hidden = a.output\nhidden[:] = b.output.save()",
        "seen.add(a.output.save())",  # whose it is, is not known
        "path.save(xs)\nfigure.save('x.png', dpi=3)",
        "",
    ],
)
def test_nothing_is_said_where_it_may_be_meant(block: str) -> None:
    assert named(block) == []


def test_the_line_says_what_to_write() -> None:
    [line] = unkept(ast.parse("xs = {1: a.output.save()}").body)
    assert line == (
        "'xs' was not kept: its items are saved, the dictionary itself is not. Add the line `xs.save()` at "
        "the block's end."
    )


def test_each_name_has_a_line_of_its_own() -> None:
    assert named("xs = [a.output.save()]\nys = (b.output.save(),)\nz = c.output.save()") == ["xs", "ys"]


def test_a_block_nested_too_deeply_to_be_read_is_no_error() -> None:
    deep: ast.expr = ast.Name("x", ast.Load())
    for _ in range(100_000):
        deep = ast.UnaryOp(ast.Not(), deep)
    assert unkept([ast.Expr(deep)]) == []
    while isinstance(deep, ast.UnaryOp):  # Python itself lets go of such a tree one level a call
        deep = deep.operand

"""Pieces of a pipeline's talk, without an engine: who has what, what is told, where a block lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.source import NO_SKIP
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import nnsight_lab as lab
from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.home import draws, places_of, stage_of
from nnsight_lab.blocks.stubs import block_tracer
from nnsight_lab.worker.elsewhere import Elsewhere, OnAnotherStage, StandIns, modules_here
from nnsight_lab.worker.runner import PipelineStage
from nnsight_lab.worker.told import Stays, packed, unpacked, versions


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.mlp(value)


class Inner(torch.nn.Module):
    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2) if not first else PPMissingLayer()
        self.layers = torch.nn.ModuleList(
            [Layer() if first <= number < last else PPMissingLayer() for number in range(4)]
        )
        self.norm = torch.nn.LayerNorm(2) if last == 4 else PPMissingLayer()


class Whole(torch.nn.Module):
    def __init__(self, first: int = 0, last: int = 4) -> None:
        super().__init__()
        self.model = Inner(first, last)
        self.head = torch.nn.Linear(2, 4) if last == 4 else PPMissingLayer()
        self.processor = torch.nn.Identity()


def stand_ins(stage: int, bounds: tuple[tuple[int, int], ...] = ((0, 2), (2, 4))) -> StandIns:
    models = [Whole(*bound) for bound in bounds]
    return StandIns(models[stage], stage, [modules_here(model) for model in models])


def test_each_stage_has_the_whole_models_tree_and_vllm_its_own():
    wanted = {path: type(module).__name__ for path, module in Whole().named_modules()}
    for stage in (0, 1):
        found = stand_ins(stage)
        with found.whole():
            seen = {path: type(module).__name__ for path, module in found._model.named_modules()}
            assert Envoy(found._model).model.layers[3].mlp.path == "model.model.layers.3.mlp"
        assert seen == wanted
        missing = [
            path for path, module in found._model.named_modules() if isinstance(module, PPMissingLayer)
        ]
        assert missing == (
            ["model.layers.2", "model.layers.3", "model.norm", "head"]
            if stage == 0
            else ["model.embed", "model.layers.0", "model.layers.1"]
        )


@pytest.mark.parametrize("stage", [0, 1])
def test_every_location_has_its_stage(stage):
    found = stand_ins(stage)
    stages = {
        "model.model.layers.1.mlp.output": 0,
        "model.model.layers.1.source.mlp_0.output": 0,
        "model.model.layers.2.input": 1,
        "model.model.norm.output": 1,
        "model.model.embed.output": 0,
        "model.model.input": 0,
        "model.model.output": 1,
        "model.input": 0,
        "model.output": 1,
        "model.logits": 1,
        "result": 1,
        "model.processor.output": None,
    }
    assert {location: found.of(location) for location in stages} == stages
    for location, of in stages.items():
        assert found.lacks(location, stage) == (of is not None and of != stage), location
    other = "output" if stage == 0 else "input"
    assert {f"model.model.{other}", f"model.{other}"} <= found.passed_over
    assert not any(".layers.0" in location or ".layers.3" in location for location in found.passed_over)


def test_three_stages_know_whose_a_module_is():
    found = stand_ins(1, ((0, 1), (1, 3), (3, 4)))
    assert [found.of(f"model.model.layers.{number}.output") for number in range(4)] == [0, 1, 1, 2]
    assert found.of("model.model.output") == 2
    assert {"model.model.input", "model.model.output"} <= found.passed_over


def test_what_a_stand_in_lacks_is_said_with_its_stage():
    found = stand_ins(0)
    with found.whole():
        norm = found._model.model.norm
        assert not hasattr(norm, "weight")  # while the tree is made it is asked for much
        found.settle()
        with pytest.raises(OnAnotherStage, match=r"'weight' of model\.model\.norm is on pipeline stage 2"):
            norm.weight
        assert isinstance(norm, Elsewhere)
        assert not hasattr(norm, "_nothing")
        assert found._model.model.layers[3].forward.__func__ is Layer.forward  # for .source


@pytest.mark.parametrize(
    "groups", [[(0, 2), (4, 3)], [(6, 1)], [(0, 3), (3, 4)], [(0, 7)]], ids=["two", "last", "all", "one"]
)
def test_what_is_told_is_the_rows_where_they_were(groups):
    def dim_of(tensor: torch.Tensor) -> int | None:
        return 0 if tensor.shape[0] == 7 else 1 if tensor.dim() > 1 and tensor.shape[1] == 7 else None

    flat, deep = torch.randn(7, 3), torch.randn(1, 7, 2)
    value = ((flat, None, torch.ones(3)), {"hidden": deep, "flag": True, "odd": object()})
    told = packed(value, groups, 7, dim_of)
    flat_before, deep_before = flat.clone(), deep.clone()
    flat.zero_(), deep.zero_()  # the model goes on
    (first, none, constant), named = unpacked(told, groups, 7)
    assert none is None
    assert torch.equal(constant, torch.ones(3))
    assert named["flag"] is True
    assert isinstance(named["odd"], Stays)
    with pytest.raises(AttributeError, match="'x' of a object, which stays on its pipeline stage"):
        named["odd"].x
    for start, size in groups:
        assert torch.equal(first[start : start + size], flat_before[start : start + size])
        assert torch.equal(named["hidden"][:, start : start + size], deep_before[:, start : start + size])
    before = versions(((first,), named))
    first[groups[0][0]] += 1
    assert versions(((first,), named)) != before
    assert packed(NO_SKIP, groups, 7, dim_of) is None


HOMES = {
    "hidden = model.model.layers[1].mlp.output[0].save()": 0,
    "model.model.layers[0].output[0][:] += push": 0,
    "for _ in tracer.all():\n    kept.append(model.model.layers[K].output[0][-1])": 1,
    "middle.output = (middle.output[0] * 2, None)": 1,
    "value = lab.residual(middle.output).save()": 1,
    "model.model.layers[-1].skip(push)": 1,
    "x = model.logits.save()": 1,
    "x = 1 + 1": 1,
    "x = model.model.layers[0].output[0]\nmodel.model.layers[3].output[0][:] += x": None,
    "for layer in model.model.layers:\n    kept.append(layer.output[0])": None,
    "K = 0\nx = model.model.layers[K].output[0].save()": None,
    "layers = model.model.layers\nx = layers[0].output": None,
    "x = model.model.norm(model.model.layers[0].output[0])": None,
    "x = helper()": None,
    "cache = tracer.cache().save()": None,
    "middle = 3": None,
}


@pytest.mark.parametrize(("source", "home"), HOMES.items())
def test_a_block_lives_on_one_stage_where_that_is_written_out(source, home):
    model = Envoy(Whole())
    names: dict[str, Any] = {"model": model, "middle": model.model.layers[2], "K": 3, "push": torch.ones(2)}

    def helper() -> Any:
        return model.model.layers[0].output

    block = Block(
        source,
        "cell",
        1,
        {"lab": lab},
        {**names, "helper": helper, "kept": [], "tracer": block_tracer(model)},
    )
    places = places_of(block)
    found = stand_ins(0)
    assert (1 if places == frozenset() else stage_of(places, found.of)) == home


@pytest.mark.parametrize("call", ["torch.randn(3)", "x.normal_()", "random.random()", "[rand(2) for _ in y]"])
def test_drawing_is_seen(call):
    assert draws(compile(f"z = {call}", "cell", "exec"))
    assert not draws(compile("z = x.mean() + torch.zeros(2)", "cell", "exec"))


@pytest.mark.parametrize("sent", [3, 5, 8])
def test_a_stage_that_replays_takes_the_rows_of_one_that_does_not(monkeypatch, sent):
    """Padded rows are nobody's: a stage that runs module by module has none, one that replays needs them."""
    kept = torch.full((8, 2), 9.0)

    def take(self: Any, num_tokens: int, found: Any, sync_self: bool) -> Any:
        kept[:num_tokens].copy_(found["hidden"][:num_tokens])
        return kept[:num_tokens]

    monkeypatch.setattr(GPUModelRunner, "sync_and_gather_intermediate_tensors", take)
    hidden = torch.randn(sent, 2)
    runner = PipelineStage.__new__(PipelineStage)
    found = runner.sync_and_gather_intermediate_tensors(5, IntermediateTensors({"hidden": hidden}), True)
    rows = min(sent, 5)
    assert torch.equal(found[:rows], hidden[:rows])
    assert found.shape == (5, 2)

"""The residual stream from a layer's output, in each form vLLM gives it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nnsight_lab as lab
from nnsight_lab.lens.residual import residual


@given(
    tokens=st.integers(1, 9), hidden=st.integers(1, 9), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_a_fused_layers_stream_is_the_sum_of_its_pair(tokens, hidden, dtype):
    wrote, stream = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
    before = wrote.clone(), stream.clone()
    found = residual((wrote, stream))
    assert found.shape == (tokens, hidden)
    assert found.dtype == dtype
    assert torch.equal(found, wrote + stream)
    found.zero_()  # a tensor of its own: the pair is untouched
    assert torch.equal(wrote, before[0])
    assert torch.equal(stream, before[1])


def test_an_unfused_layers_output_is_the_stream():
    stream = torch.randn(5, 8)
    assert torch.equal(residual(stream), stream)
    assert torch.equal(residual((stream,)), stream)
    assert torch.equal(residual((stream, None)), stream)


def test_a_batch_axis_of_one_is_dropped():
    stream = torch.randn(1, 5, 8)
    assert torch.equal(residual(stream), stream[0])
    assert residual((stream,)).shape == (5, 8)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (None, "NoneType"),
        ((), r"tuple\(\)"),
        ([torch.zeros(2, 3), torch.zeros(2, 3)], r"list\(\(2, 3\), \(2, 3\)\)"),
        ((torch.zeros(2, 3), torch.zeros(2, 4)), r"tuple\(\(2, 3\), \(2, 4\)\)"),
        ((torch.zeros(2, 3), "positions"), r"tuple\(\(2, 3\), str\)"),
        ({"hidden": torch.zeros(2, 3)}, "dict"),
    ],
)
def test_anything_else_is_refused_by_its_shape(output, shown):
    with pytest.raises(TypeError, match=f"Not a decoder layer's output.*{shown}"):
        residual(output)


def test_the_packages_front_door_leads_there():
    pair = torch.ones(2, 3), torch.ones(2, 3)
    assert torch.equal(lab.residual(pair), residual(pair))


def test_the_lens_needs_neither_nnsight_nor_vllm():
    code = "import sys, nnsight_lab.lens; print({'nnsight', 'vllm'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"

"""How pipeline stages tell each other what their blocks were given.

A message is the codec's tree, sent between CPUs, and its tensors, sent from device to device. The hard facts:
a send waits for whoever receives it, so one that the next stage takes only after it was handed the
activations must not be waited for; and a jailed worker opens no connection, so both groups are used once as
they are made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nnsight_lab.wire.codec import flatten, unflatten
from nnsight_lab.wire.tensors import DTYPES, NAMES


class Channel:
    """The stages of one pipeline.

    Made on every rank of the world at once.

    Args:
        pipelines: The global ranks of each pipeline of the world, by stage; the same list on every rank.
        device: Where tensors are.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], device: torch.device) -> None:
        self._device = device
        mine = dist.get_rank()
        for ranks in pipelines:
            words = dist.new_group(list(ranks), backend="gloo")
            tensors = dist.new_group(list(ranks), backend="nccl") if device.type == "cuda" else words
            if mine in ranks:
                self._ranks, self._words, self._tensors = list(ranks), words, tensors
        self._stage = self._ranks.index(mine)
        #: What is on its way, and what it is sent from.
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        for stage in range(len(self._ranks) - 1):
            for first, second in ((stage, stage + 1), (len(self._ranks) - 1, stage)):
                if self._stage == first:
                    self.send(second, [torch.zeros(1, device=device)])
                elif self._stage == second:
                    self.receive(first)
        self._wait()

    def send(self, stage: int, message: Any) -> None:
        """Send what the codec takes; not waited for."""
        self._leaving = [one for one in self._leaving if not one[0].is_completed()]
        tensors: list[torch.Tensor] = []

        def put(tensor: torch.Tensor) -> int:
            tensors.append(tensor.detach().contiguous())
            return len(tensors) - 1

        tree = flatten(message, put)
        table = [(NAMES[tensor.dtype], tuple(tensor.shape), tensor.is_cpu) for tensor in tensors]
        text = bytearray(json.dumps([table, tree]).encode())
        words = torch.frombuffer(text, dtype=torch.uint8)
        to = self._ranks[stage]
        for tensor in (torch.tensor([len(text)]), words):
            self._leaving.append((dist.isend(tensor, to, group=self._words), tensor))
        for tensor in tensors:
            if tensor.nbytes:
                group = self._words if tensor.is_cpu else self._tensors
                flat = tensor.view(-1).view(torch.uint8)
                self._leaving.append((dist.isend(flat, to, group=group), flat))

    def receive(self, stage: int) -> Any:
        """What that stage sent; waits for it. Its tensors are where they were, and may be written to."""
        source = self._ranks[stage]
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._words)
        words = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(words, source, group=self._words)
        table, tree = json.loads(words.numpy().tobytes())
        found: list[torch.Tensor] = []
        with torch.inference_mode(False):  # one that counts what is written to it
            for name, shape, on_cpu in table:
                device = torch.device("cpu") if on_cpu else self._device
                found.append(torch.empty(shape, dtype=DTYPES[name], device=device))
        for tensor in found:
            if tensor.nbytes:
                group = self._words if tensor.is_cpu else self._tensors
                dist.recv(tensor.view(-1).view(torch.uint8), source, group=group)
        return unflatten(tree, lambda handle: found[handle])  # type: ignore[index]

    def _wait(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


def pipelines_of(ranks: Sequence[int], everybody: Any) -> list[list[int]]:
    """The pipelines of the world, the same list on every rank.

    Args:
        ranks: Those of this rank's own pipeline.
        everybody: The group of all ranks, over CPUs.
    """
    told: list[Any] = [None] * dist.get_world_size(everybody)
    dist.all_gather_object(told, list(ranks), group=everybody)
    return [list(one) for one in sorted({tuple(one) for one in told})]

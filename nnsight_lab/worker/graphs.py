"""Two CUDA graphs of every batch size: one whole, and one that stops at the taps.

The hard fact: a graph that stops to run Python pays a launch for each piece, 64 on a model of 32 layers, also
where nobody waits there. vLLM's breakable graphs can be recorded twice, over the same memory, so a step in
which no block waits on a tap replays one piece. Recording is a matter of milliseconds a size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nnsight.modeling.vllm import interleaver as upstream
from nnsight.util import apply
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper, _BreakableEntry
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available


class Stop:
    """Where a recorded graph stops: what is served there, in order."""

    def __init__(self, serve: Callable[[str, Any], None]) -> None:
        self.locations: list[tuple[str, Any]] = []
        self._serve = serve

    def __call__(self) -> None:
        for location, live in self.locations:
            self._serve(location, live)


class Recording:
    """One recording of the graph that stops at taps."""

    def __init__(self, taps: frozenset[str], serve: Callable[[str, Any], None]) -> None:
        self._taps = taps
        self._serve = serve
        self._last: Stop | None = None
        self._computed: set[int] = set()

    def reached(self, location: str, value: Any) -> None:
        """Stop the graph here, if this is a tap."""
        last, self._last = self._last, None
        if location not in self._taps:
            return
        capture = upstream._capture()
        if capture is None:
            return
        live = upstream._weak(value)
        places: set[int] = set()
        apply(live, lambda tensor: places.add(tensor.data_ptr()), torch.Tensor)
        # A layer's output and the next one's input are the same moment, where nothing new was computed.
        if last is not None and places <= self._computed:
            last.locations.append((location, live))
            self._last = last
            return
        self._computed |= places
        stop = self._last = Stop(self._serve)
        stop.locations.append((location, live))
        capture.add_eager(stop)


class TwoGraphs(BreakableCUDAGraphWrapper):
    """vLLM's graph wrapper, with a second graph of each size.

    Args:
        runnable: The model.
        vllm_config: vLLM's.
        interleaver: Says whether a step stops at taps, and records them.
    """

    def __init__(self, runnable: Any, vllm_config: Any, interleaver: Any) -> None:
        super().__init__(runnable, vllm_config)
        self.stopping: dict[Any, Any] = {}
        self.interleaver = interleaver

    def clear_graphs(self) -> None:
        """Forget every graph."""
        super().clear_graphs()
        self.stopping.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, replay one of its graphs, or record both."""
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode == CUDAGraphMode.NONE:
            return self.runnable(*args, **kwargs)
        descriptor = context.batch_descriptor
        whole = self.entries.get(descriptor)
        if whole is None or whole.capture is None:
            output = super().__call__(*args, **kwargs)
            if self.interleaver.taps:
                entry = self.stopping[descriptor] = _BreakableEntry(batch_descriptor=descriptor)
                with self.interleaver.recorded():
                    self._capture(entry, args, kwargs)
            return output
        entry = self.stopping[descriptor] if self.interleaver.stops else whole
        return self._replay(entry, args, kwargs)

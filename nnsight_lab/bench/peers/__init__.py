"""Peers side by side: the same works, each peer in a process and, where it must, an environment of its own.

The hard fact: peers cannot share a process or even an environment (vllm-lens's worker extension collides
with the ``.save`` that nnsight mounts on every object), and each holds its model, so they run one after
another and not in interleaved rounds. Plain vLLM therefore runs first and again last, and what changed
between is told as ``drift``. Hugging Face transformers runs before all of them and leaves its values; a
peer's values are compared with those, and the speed of wrong values is not told.

Nothing is tuned against a peer: each runs as its own documentation says, with its own defaults. Only prefix
caching is off everywhere, since a repeated prompt would be answered from the round before.
"""

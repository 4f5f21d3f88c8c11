"""Pure tensor functions: what a value of a forward pass means. Shapes in every docstring.

In a block as well as outside: ``lab.lens.read_logits(model.logits, top_k=5).ids.save()``.
"""

from __future__ import annotations

from nnsight_lab.lens.attention import Attention
from nnsight_lab.lens.logit_lens import LogitLens
from nnsight_lab.lens.logits import Reading, read_logits
from nnsight_lab.lens.pattern import attention_pattern
from nnsight_lab.lens.residual import residual

__all__ = ["Attention", "LogitLens", "Reading", "attention_pattern", "read_logits", "residual"]

"""What tells one sequence of tokens from another, so that views can share a position.

The hard fact: views of one prompt are made by calls that know nothing of each other, in cells that may be
hours apart. So the tokens themselves are the name. A sequence still being generated goes by its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b


def sequence_key(token_ids: Sequence[int], tokens: Sequence[str] = ()) -> str:
    """A short name for a sequence, the same wherever its tokens are.

    Args:
        token_ids: Of the prompt; empty where they are not known.
        tokens: Their texts, which count only where there are no ids.

    Returns:
        Hexadecimal digits; empty where there is no token at all.
    """
    named: list[int] | list[str] = [int(each) for each in token_ids]
    named = named or [str(each) for each in tokens]
    return blake2b(json.dumps(named).encode(), digest_size=8).hexdigest() if named else ""

"""How a number of bytes is written for people, everywhere.

Units are powers of a thousand, as those of disks and of ``save_budget="500MB"`` are. Two decimals, so that
what was asked and what is allowed still differ where they stand in one sentence.
"""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("kB", "MB", "GB", "TB")


def shown_bytes(nbytes: float) -> str:
    """As in ``"812 B"``, ``"1.97 MB"``, ``"570 MB"``."""
    if abs(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    scaled = ((nbytes / 1000**power, unit) for power, unit in enumerate(_UNITS, 1))
    # 999,999 bytes are 1 MB, not 1,000 kB; past the last unit its numbers grow.
    fits = ((amount, unit) for amount, unit in scaled if round(abs(amount), 2) < 1000)
    amount, unit = next(fits, (nbytes / 1000 ** len(_UNITS), _UNITS[-1]))
    return f"{f'{amount:,.2f}'.rstrip('0').rstrip('.')} {unit}"

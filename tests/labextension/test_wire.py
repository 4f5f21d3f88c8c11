"""Both sides of the panel's conversations, with kernels and with the server, say the same words."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from types import ModuleType

import pytest

from nnsight_lab.wire import machine, panel

TYPESCRIPT = Path(__file__).resolve().parents[2] / "labextension" / "src" / "lab"
#: What the page is told by, and its mirror there.
SIDES = [(panel, "wire.ts"), (machine, "machineWire.ts")]


@pytest.mark.parametrize(("wire", "mirror"), SIDES)
def test_the_constants_are_those_of_the_page(wire: ModuleType, mirror: str) -> None:
    ours = {name: value for name, value in vars(wire).items() if name.isupper()}
    text = (TYPESCRIPT / mirror).read_text()
    theirs = dict(re.findall(r"^export const (\w+) = (.+);$", text, re.MULTILINE))
    assert {name: str(value) for name, value in ours.items()} == {
        name: value.strip("'") for name, value in theirs.items()
    }


@pytest.mark.parametrize(("wire", "mirror"), SIDES)
def test_the_records_have_the_fields_and_types_of_the_page(wire: ModuleType, mirror: str) -> None:
    theirs = {
        name: dict(re.findall(r"^  (\w+): ([\w\[\]]+);$", body, re.MULTILINE))
        for name, body in re.findall(
            r"^export interface (\w+) \{\n(.*?)^\}", (TYPESCRIPT / mirror).read_text(), re.MULTILINE | re.DOTALL
        )
    }
    records = {name: kind for name, kind in vars(wire).items() if dataclasses.is_dataclass(kind)}
    assert set(theirs) == set(records)
    for name, record in records.items():
        hints = typing.get_type_hints(record)
        ours = {field.name: _typescript(hints[field.name]) for field in dataclasses.fields(record)}
        assert ours == theirs[name], name


def _typescript(hint: object) -> str:
    if typing.get_origin(hint) is list:
        return f"{_typescript(typing.get_args(hint)[0])}[]"
    named = {str: "string", int: "number", float: "number", bool: "boolean"}
    return named.get(hint) or hint.__name__  # type: ignore[call-overload, attr-defined, no-any-return]

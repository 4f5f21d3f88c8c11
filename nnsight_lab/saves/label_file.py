"""The JSON beside a safetensors file: trees, plain values, and what is known of each save.

```
{"format": "nnsight_lab saves", "version": 1,
 "safetensors": {"bytes": n, "header_sha256": hex},
 "requests": [{"request_id": text,
               "common": the label fields that all saves of the request share, as the codec's tree,
               "tensors": [[handle, name in the safetensors file, dtype, shape], ...],
               "saves": [{"sequence": n, "block": text, "name": text, "module_path": text,
                          "tree": the value as the codec's tree, its tensors as handles,
                          "leaves": [{"path", "kind", "dtype", "shape", "tensor"}, ...]}, ...]}, ...]}
```

``leaves`` is for people and other programs. It is not read back: labels are made from the trees and the
tensors themselves, so that a file cannot say one thing and hold another.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from nnsight_lab.errors import CannotTravel, FileRefused
from nnsight_lab.saves.held import Held, HeldSave, Slot, Spec, held_save, save_fields
from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.saves.layout import Span, item_bytes
from nnsight_lab.saves.mapped import FileTensors, Seal
from nnsight_lab.wire.codec import Handle, flatten, unflatten
from nnsight_lab.wire.limits import MAX_HEADER_BYTES, WireError, extent
from nnsight_lab.wire.registry import fits

FORMAT: Final = "nnsight_lab saves"
VERSION: Final = 1

_HINTS: Final = typing.get_type_hints(SaveLabel)
#: What differs between the saves of a request, or follows from them.
_OWN: Final = {
    *Slot._fields,
    *("request_id", "edit_version", "path", "step", "kind", "shape", "dtype", "bytes", "module_path"),
}
COMMON: Final = frozenset(field.name for field in dataclasses.fields(SaveLabel)) - _OWN
_UNSEALED: Final = Seal(0, "")


def common_tree(common: Mapping[str, Any]) -> Any:
    """The fields that a request's labels share, as JSON.

    Raises:
        TypeError: One is none of a label's.
        CannotTravel: One is no plain value.
    """
    unknown = common.keys() - COMMON
    if unknown:
        raise TypeError(f"{sorted(unknown)} are no fields that labels share; those are {sorted(COMMON)}")
    return flatten(dict(common), _no_tensor, name="common")


def tensor_names(requests: Sequence[Held]) -> list[dict[int, str]]:
    """What a plain safetensors reader calls each tensor: of each request, by handle.

    ``request/sequence/block/name``, without those that are the same for all, and the path inside the value:
    ``hidden[3]['x']``.
    """
    slots = [(held.request_id, *slot) for held in requests for slot in held.saves]
    varies = [len({slot[part] for slot in slots}) > 1 for part in range(3)]
    taken = {"__metadata__"}
    names: list[dict[int, str]] = []
    for held in requests:
        mine: dict[int, str] = {}
        for slot, save in held.saves.items():
            parts = (held.request_id, *slot)
            prefix = "".join(f"{part}/" for part, said in zip(parts, varies, strict=False) if said)
            paths: dict[int, str] = {}
            for handle, label in zip(save.handles, save.labels, strict=True):
                paths.setdefault(handle, label.path)
            for handle in sorted(save.used - mine.keys()):
                wanted = prefix + slot.name + paths.get(handle, "(bytes)")
                mine[handle] = _free(wanted.encode("utf-8", "backslashreplace").decode(), taken)
        names.append(mine)
    return names


def _free(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}~{number}"
    taken.add(name)
    return name


def written(requests: Sequence[Held], names: Sequence[Mapping[int, str]], seal: Seal) -> bytes:
    """The label file's text.

    Raises:
        CannotTravel: It would be too large to be read back.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "safetensors": {
            "bytes": seal.nbytes,
            "header_sha256": seal.header_sha256,
            **({} if seal.data_crc32 is None else {"data_crc32": seal.data_crc32}),
        },
        "requests": [_request(held, mine) for held, mine in zip(requests, names, strict=True)],
    }
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise CannotTravel(
            f"the saves hold {len(text):,} bytes of text and numbers besides their tensors, more than "
            f"{MAX_HEADER_BYTES:,}. Save the numbers as tensors, or fewer requests in one file."
        )
    return text


def _request(held: Held, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        "request_id": held.request_id,
        "common": common_tree(held.common),
        "tensors": [
            [handle, names[handle], spec.dtype, list(spec.shape)] for handle, spec in held.specs.items()
        ],
        "saves": [_save(slot, save, names) for slot, save in held.saves.items()],
    }


def _save(slot: Slot, save: HeldSave, names: Mapping[int, str]) -> dict[str, Any]:
    leaves = [
        {
            "path": label.path,
            "kind": label.kind,
            "dtype": label.dtype,
            "shape": list(label.shape),
            "tensor": names.get(handle),
        }
        for label, handle in zip(save.labels, save.handles, strict=True)
    ]
    module_path = save.labels[0].module_path if save.labels else ""
    return {**slot._asdict(), "module_path": module_path, "tree": save.tree, "leaves": leaves}


@dataclasses.dataclass(frozen=True)
class LabelFile:
    """A label file that was read, before its tensors were looked at.

    Attributes:
        seal: How the safetensors file is known.
        requests: As in the file.
        specs: Of all requests, each tensor of the safetensors file.
    """

    seal: Seal
    requests: list[dict[str, Any]]
    specs: dict[str, Spec]


def parsed(text: bytes) -> LabelFile:
    """Check a label file's own forms.

    Raises:
        FileRefused: It is not one; says why.
    """
    try:
        document = json.loads(text.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"it cannot be read: {error!s:.200}") from None
    if type(document) is not dict or document.get("format") != FORMAT:
        raise FileRefused("it is no label file of saves")
    if document.get("version") != VERSION:
        raise FileRefused(f"it has format {document.get('version')!r:.40}, and this version reads {VERSION}")
    seal = _member(document, "safetensors", dict)
    requests = _member(document, "requests", list)
    specs: dict[str, Spec] = {}
    for request in requests:
        for entry in _member(request, "tensors", list):
            if not fits(entry, list[Any]) or list(map(type, entry)) != [int, str, str, list]:
                raise FileRefused(f"it describes a tensor as {entry!r:.80}")
            _, name, dtype, shape = entry
            if name in specs:
                raise FileRefused(f"it has the tensor {name!r:.80} twice")
            specs[name] = Spec(dtype, tuple(shape))
            extent(shape, item_bytes(specs[name]))
    crc = _member(seal, "data_crc32", int) if "data_crc32" in seal else None
    known = Seal(_member(seal, "bytes", int), _member(seal, "header_sha256", str), crc)
    return LabelFile(known, requests, specs)


def held_in(request: dict[str, Any], path: Path, seal: Seal, spans: Mapping[str, Span]) -> Held:
    """One request of a parsed label file, its tensors in the safetensors file at ``path``.

    Raises:
        FileRefused: Its fields are not what they should be.
        WireError: A tree is malformed.
    """
    common = unflatten(_member(request, "common", dict), _no_tensor)
    if type(common) is not dict or not common.keys() <= COMMON:
        raise FileRefused("it has unknown label fields")
    for name, value in common.items():
        if not fits(value, _HINTS[name]):
            raise FileRefused(f"it has {value!r:.80} as the label field {name}")
    rows = request["tensors"]
    specs = {handle: Spec(dtype, tuple(shape)) for handle, _, dtype, shape in rows}
    if len(specs) != len(rows):
        raise FileRefused("it has two tensors of one handle")
    tensors = FileTensors(path, seal, specs, {handle: spans[name] for handle, name, _, _ in rows})
    held = Held(_member(request, "request_id", str), common, {}, dict(specs), {}, tensors)
    held.sizes = {handle: span.stop - span.start for handle, span in tensors.spans.items()}
    for save in _member(request, "saves", list):
        slot = Slot(_member(save, "sequence", int), _member(save, "block", str), _member(save, "name", str))
        if slot in held.saves:
            raise FileRefused(f"it has {slot.name!r:.80} of block {slot.block!r:.80} twice")
        fields = save_fields(common, slot.block) | {"module_path": _member(save, "module_path", str)}
        held.saves[slot] = held_save(held, slot, save.get("tree"), fields)
    return held


def _member(where: Any, name: str, kind: type) -> Any:
    value = where.get(name) if type(where) is dict else None
    if type(value) is not kind:
        raise FileRefused(f"its {name!r} is {value!r:.80} where a {kind.__name__} belongs")
    return value


def _no_tensor(handle: Handle | torch.Tensor) -> Any:
    if isinstance(handle, torch.Tensor):
        raise CannotTravel("common holds a tensor: labels are plain values")
    raise WireError("a label refers to a tensor")


def _no_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")

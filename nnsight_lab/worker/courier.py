"""How saved values leave a worker: small ones in the reply, large ones through shared memory.

On CUDA the copy to the host runs on a stream of its own and is begun when a block *ends*, not when
its request is collected, so that it overlaps the next step's work; collecting waits for the copies of
the requests it collects and of those that were packed together with them: the copies of the step under way
have only begun.
What is copied is what the block saved and nothing else it held.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nnsight_lab.errors import CannotTravel
from nnsight_lab.saves.slab import NoRoom, Place, SlabPool
from nnsight_lab.wire.extent import Extent, Packed
from nnsight_lab.wire.limits import REPLY_BYTES as INLINE_BYTES
from nnsight_lab.wire.messages import WorkerError
from nnsight_lab.wire.packed import Layout, Stack
from nnsight_lab.wire.sizes import shown_bytes as shown

_NAMED = 4
_NOWHERE: dict[str, Any] = {
    "name": "none",
    "memory_dir": "/dev/shm",
    "memory_bytes": 0,
    "spill_dir": "/tmp",
    "spill_bytes": 0,
}


class Copies(NamedTuple):
    """Copies under way on the copy stream.

    Attributes:
        done: Reached when the last one is over.
        sources: What they read: its memory may not be handed out before that.
    """

    done: torch.cuda.Event
    sources: tuple[torch.Tensor, ...]


class Parcel(NamedTuple):
    """What one block saved, ready to leave.

    Attributes:
        values: Those that ride the reply.
        packed: The rest, in shared memory.
        error: Why some did not come.
        copies: What `packed` still waits for; None where it is there.
    """

    values: dict[str, Any]
    packed: Packed | None = None
    error: WorkerError | None = None
    copies: Copies | None = None

    def settle(self) -> None:
        """Wait until what was packed is there."""
        if self.copies is not None:
            self.copies.done.synchronize()


class Courier:
    """Packs what blocks saved.

    Args:
        settings: ``name``, ``memory_dir``, ``memory_bytes``, ``spill_dir``, ``spill_bytes``; None where
            no engine of ours started the worker: then everything rides the reply.
        rank: This worker's rank.
        device: Where the model's values are.
    """

    def __init__(self, settings: Mapping[str, Any] | None, rank: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        #: Where blocks compute (see `nnsight_lab.worker.aside`); None where that is the model's own stream.
        self.aside: Any = None
        self._inline_bytes = INLINE_BYTES if settings else sys.maxsize
        settings = settings or _NOWHERE
        #: Where its files are.
        self.folders = (str(settings["memory_dir"]), str(settings["spill_dir"]))
        #: Of text and numbers, which ride the reply, a block may save as much as of tensors.
        self._most_bytes = int(settings["memory_bytes"]) + int(settings["spill_bytes"])
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        #: Reached when all is there that is being packed together; None where nothing is.
        self._done: Any = None
        self._pool = SlabPool(
            str(settings["name"]),
            rank,
            [
                Place(Path(settings["memory_dir"]), int(settings["memory_bytes"])),
                Place(Path(settings["spill_dir"]), int(settings["spill_bytes"])),
            ],
            pin=_pin if self._cuda else None,
            unpin=_unpin if self._cuda else None,
            warm_bytes=int(settings["memory_bytes"]),
        )

    @property
    def overlaps(self) -> bool:
        """Whether packing early gains anything."""
        return self._cuda

    @property
    def used_bytes(self) -> int:
        """What the pieces in use take."""
        return self._pool.used_bytes

    def pack(self, values: dict[str, Any], *, allowed_bytes: int | None = None, share: str = "") -> Parcel:
        """Take a block's values out of the model's memory.

        Args:
            values: Name -> what was saved.
            allowed_bytes: The request's own limit.
            share: Whose slabs they go to, where somebody is to map them; "" for everybody else's.
        """
        kept, refused = values, None
        try:
            layout = Layout.of(values, name="saves")
        except CannotTravel:
            kept, refused = _without_refused(values)
            layout = Layout.of(kept, name="saves")
        nbytes = layout.nbytes + len(layout.tree)  # text and numbers are bytes, too
        if allowed_bytes is not None and nbytes > allowed_bytes:
            return Parcel({}, error=_over(kept, nbytes, allowed_bytes, "this request's save_budget"))
        if len(layout.tree) > max(self._inline_bytes, self._most_bytes):
            return Parcel({}, error=_over(kept, nbytes, self._most_bytes, "the engine's save_budget"))
        small = layout.nbytes <= self._inline_bytes
        # A value on a device is copied beside the model's work, however small; in the reply it would be
        # waited for between two steps.
        if small and not any(source.is_cuda for source in layout.sources):
            return Parcel(kept, error=refused)
        try:
            extent = self._pool.allocate(layout.nbytes, share)
        except NoRoom as full:
            if small:
                return Parcel(kept, error=refused)
            return Parcel(
                {}, error=_over(kept, layout.nbytes, full.allowed_bytes, "what the engine has left")
            )
        try:
            copies = self._copy(layout, extent)
        except Exception as failure:  # no GPU memory for a strided copy: that block's, not the engine's
            if self._stream is not None:
                self._stream.synchronize()  # what was begun must not land in the piece's next owner
            self._pool.release([extent])
            said = f"what the block saved could not be copied ({type(failure).__name__}: {failure})"
            return Parcel({}, error=WorkerError("CannotTravel", said))
        return Parcel({}, layout.packed(extent), refused, copies)

    def pack_stack(self, stack: Stack) -> tuple[Extent, Parcel] | None:
        """Take what many requests saved out of the model's memory, in one copy.

        Returns:
            The piece that holds it, one request's after the other, and what to wait for; None where there is
            no room for all of it.
        """
        if not self._inline_bytes < sys.maxsize:
            return None  # there is no shared memory
        try:
            extent = self._pool.allocate(stack.requests * stack.nbytes)
        except NoRoom:
            return None
        try:
            return extent, Parcel({}, copies=self._copy_stack(stack, extent))
        except Exception:  # no GPU memory for all of it
            if self._stream is not None:
                self._stream.synchronize()
            self._pool.release([extent])
            return None

    def take_back(self, parcel: Parcel) -> None:
        """Give up what was packed for a request that nobody will collect."""
        if parcel.packed is not None:
            parcel.settle()  # a copy under way would land in the piece's next owner
            self.release([parcel.packed.extent])

    def release(self, extents: Sequence[Extent]) -> list[str]:
        """Pieces the kernel no longer looks at."""
        return self._pool.release(extents)

    def retire(self, paths: Sequence[str]) -> None:
        """Slabs that somebody may look at for ever."""
        self._pool.retire(paths)

    def given_up(self) -> list[str]:
        """Files of slabs given up since this was last asked."""
        return self._pool.given_up()

    def figures(self) -> dict[str, Any]:
        """The slabs, in figures."""
        return self._pool.figures()

    def close(self) -> None:
        """Give all memory up."""
        self._pool.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is packed in here is copied behind one wait for the model, and waited for as one.

        A wait, a change of stream and an event for each of a hundred requests is more than the copies take.
        No block may run in here.
        """
        if self._stream is None or self._done is not None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        if self.aside is not None:
            self.aside.join(self._stream)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            done, self._done = self._done, None
            done.record(self._stream)

    def _copy(self, layout: Layout, extent: Extent) -> Copies | None:
        memory = self._pool.view(extent)
        if self._stream is None:
            layout.copy_into(memory)
            return None
        with self.together():
            layout.copy_into(memory, non_blocking=True)
            return Copies(self._done, layout.sources)

    def _copy_stack(self, stack: Stack, extent: Extent) -> Copies | None:
        memory = self._pool.view(extent)
        if self._stream is None:
            stack.copy_into(memory)
            return None
        with self.together():
            source = stack.copy_into(memory, non_blocking=True)
            return Copies(self._done, (source,))


def _without_refused(values: Mapping[str, Any]) -> tuple[dict[str, Any], WorkerError]:
    kept: dict[str, Any] = {}
    first: str | None = None
    for name, value in values.items():
        try:
            Layout.of(value, name=name)
            kept[name] = value
        except CannotTravel as refusal:
            first = first or str(refusal)
    return kept, WorkerError("CannotTravel", first or "a value cannot travel")


def _over(values: Mapping[str, Any], asked: int, allowed: int, limit: str) -> WorkerError:
    layouts = {name: Layout.of(value, name=name) for name, value in values.items()}
    sizes = sorted(((one.nbytes + len(one.tree), name) for name, one in layouts.items()), reverse=True)
    named = ", ".join(f"{name} ({shown(size)})" for size, name in sizes[:_NAMED])
    more = f" and {len(sizes) - _NAMED} more" if len(sizes) > _NAMED else ""
    return WorkerError(
        "OverBudget",
        f"the block saved {shown(asked)}, {limit} is {shown(allowed)}: {named}{more}. Save less (a row, a "
        "mean) or raise save_budget",
    )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pin(memory: torch.Tensor) -> None:
    """Register pages with CUDA, so that copies into them run beside the model's work."""
    error = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister failed with {error} for {memory.numel()} bytes")


def _unpin(memory: torch.Tensor) -> None:
    _cudart().cudaHostUnregister(memory.data_ptr())

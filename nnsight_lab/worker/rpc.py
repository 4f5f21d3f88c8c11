"""What the engine may ask of a worker, the same on every platform."""

from __future__ import annotations

from typing import Any


class LabRPC:
    """Methods reached by name through vLLM's ``collective_rpc``; mixed into a vLLM worker."""

    model_runner: Any

    def lab_register(self, registration_id: str, payload: bytes, name: str) -> None:
        """Install an edit."""
        self.model_runner.lab_register(registration_id, payload, name)

    def lab_declare(self, registration_id: str, payload: bytes, name: str) -> None:
        """Install an edit that was told as data: nothing of it is unpickled."""
        self.model_runner.lab_declare(registration_id, payload, name)

    def lab_trust(self, level: str, jailed: bool, uid: int | None) -> dict[str, str]:
        """Trust blocks so far and no further; what became of each layer of the jail."""
        layers: dict[str, str] = self.model_runner.lab_trust(level, jailed, uid)
        return layers

    def lab_clear(self, registration_ids: list[str]) -> None:
        """Forget edits."""
        self.model_runner.lab_clear(registration_ids)

    def lab_collect(
        self, ids: list[str], outputs: bytes | None = None, returned: bytes | None = None
    ) -> bytes:
        """Take the saves of finished requests."""
        encoded: bytes = self.model_runner.lab_collect(ids, outputs, returned)
        return encoded

    def lab_look(self, asked: bytes) -> bytes:
        """A piece of a logit lens or of attention patterns."""
        found: bytes = self.model_runner.lab_look(asked)
        return found

    def lab_peek(self, asked: bytes) -> bytes:
        """What a running request's blocks have saved so far, from where it was last looked at."""
        found: bytes = self.model_runner.lab_peek(asked)
        return found

    def lab_describe(self) -> bytes:
        """The model's modules, for a kernel that has not built it."""
        described: bytes = self.model_runner.lab_describe()
        return described

    def lab_free(self, ids: list[str]) -> None:
        """Forget aborted requests."""
        self.model_runner.lab_free(ids)

    def lab_release(self, extents: bytes) -> list[str]:
        """Take back pieces of shared memory the kernel no longer looks at; returns files given up."""
        gone: list[str] = self.model_runner.lab_release(extents)
        return gone

    def lab_retire(self, paths: list[str]) -> list[str]:
        """Never write to these files of shared memory again; returns the files given up."""
        gone: list[str] = self.model_runner.lab_retire(paths)
        return gone

    def lab_used_bytes(self) -> int:
        """Bytes of shared memory in use by saves that the kernel still looks at."""
        return int(self.model_runner.courier.used_bytes)

    def lab_slabs(self) -> dict[str, Any]:
        """Shared memory of saves: ``used_bytes``, ``total_bytes``, ``count``, ``made``, ``made_s``."""
        figures: dict[str, Any] = self.model_runner.lab_slabs()
        return figures

    def lab_trim(self) -> bool:
        """Give memory that is free in the C heap back to the system; whether there was a way to."""
        return bool(self.model_runner.heap.trim(at_once=True))

    def lab_steps(self) -> dict[str, Any]:
        """How steps were run: ``steps`` by kind, and the ``reasons`` why some did not replay a graph."""
        figures: dict[str, Any] = self.model_runner.lab_steps()
        return figures

    def nnsight_request_count(self) -> int:
        """How many requests with blocks this worker still tracks: 0 when all have gone home."""
        return len(self.model_runner.nnsight_requests.requests)

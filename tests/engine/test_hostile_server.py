"""A kernel and a server that means it harm: nothing large is allocated on its word, and the error says so."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from nnsight_lab.engine import bounded
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.remote import RemoteSampling
from nnsight_lab.engine.remote_driver import RemoteDriver
from nnsight_lab.errors import EngineDied, LabError, OverBudget, ServerError
from nnsight_lab.wire.codec import WireError, encode, encode_parts, head_of
from nnsight_lab.wire.extent import Extent, Packed
from nnsight_lab.wire.messages import BlockSaves, RequestSaves, SequenceSaves
from nnsight_lab.wire.serving import CallOver, OutputSeen, Parked, SavesHere, SavesSeen

MIB = 2**20


class Hostile(ThreadingHTTPServer):
    """Answers what it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        #: What a call is answered: the frames' own lengths, and what is sent in place of a message.
        self.frames: list[tuple[int, bytes]] = []
        self.piece: bytes = b""
        self.other: Iterator[bytes] | bytes = b""
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hostile

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        self.send_response(200)
        if self.path.endswith("/calls"):
            body: list[bytes] = [n.to_bytes(8, "little") + said for n, said in self.server.frames]
        elif "/parked/" in self.path and self.command == "GET":
            body = [self.server.piece]
            self.send_header("Content-Length", str(len(self.server.piece)))
        else:
            body = [self.server.other] if isinstance(self.server.other, bytes) else self.server.other  # type: ignore[assignment]
            for name, value in self.server.headers.items():
                self.send_header(name, value)
        self.end_headers()
        try:
            for one in body:
                self.wfile.write(one)
        except OSError:
            return

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with Hostile() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def driver(hostile: Hostile) -> Iterator[RemoteDriver]:
    found = RemoteDriver(hostile.url, "a-token-of-some-length")
    yield found
    found.home.close()
    found.close()
    found._calls.shutdown(wait=True)
    found._threads.shutdown(wait=True)


def frame(message: object) -> tuple[int, bytes]:
    said = encode(message)
    return len(said), said


def outcome(driver: RemoteDriver) -> BaseException | None:
    """What becomes of a call."""
    call = Call([LabRequest("One", RemoteSampling({}))])  # type: ignore[arg-type]
    driver.submit(call)
    return call.future.exception(timeout=60)


def test_a_server_that_means_well_is_believed(hostile: Hostile, driver: RemoteDriver) -> None:
    message = encode_parts(SavesSeen(0, RequestSaves("x")))
    head = head_of(message)
    hostile.frames = [frame(Parked("p", head.nbytes, len(head.contents), head.contents)), frame(CallOver())]
    assert outcome(driver) is None


@pytest.mark.parametrize("claimed", [9 * MIB, 2**40, 2**64 - 1])
def test_a_frame_that_claims_to_be_long_ends_the_call(
    hostile: Hostile, driver: RemoteDriver, claimed: int
) -> None:
    hostile.frames = [(claimed, b"")]
    error = outcome(driver)
    assert isinstance(error, WireError)
    assert "a frame claims" in str(error)


SLAB = Path("/dev/shm") / f"nnsight_lab.hostile.{os.getpid()}.0.0"
#: Saves that are said to lie in a file of this machine.
RESTING = RequestSaves(
    "x",
    (
        SequenceSaves(
            0, (BlockSaves("trace", {}, None, Packed("{}", Extent(str(SLAB), 64, 0, 64, 0), "[[0]]")),)
        ),
    ),
)


def parked(nbytes: int, head_bytes: int, head: bytes = b"") -> Parked:
    return Parked("p", nbytes, head_bytes, head)


HEAD = head_of(encode_parts({"x": torch.zeros(2 * MIB, dtype=torch.uint8)}))


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (parked(2**50, 100), OverBudget),
        (parked(-5, 100), WireError),
        (parked(100, 0), WireError),
        (parked(100, 200), WireError),
        (parked(HEAD.nbytes, 50, HEAD.contents), WireError),
        (parked(HEAD.nbytes + 64, len(HEAD.contents), HEAD.contents), WireError),
        (parked(HEAD.nbytes, len(HEAD.contents), b"\xff" * len(HEAD.contents)), WireError),
        (parked(HEAD.nbytes, len(HEAD.contents), HEAD.contents), WireError),  # its piece has 3 bytes
        (OutputSeen(5, None, None, (), True), WireError),
        (OutputSeen(-1, None, None, (), True), WireError),
        (SavesSeen("0", None), WireError),  # type: ignore[arg-type]
        (SavesHere(1, ()), WireError),
        (["no message of a call"], WireError),
    ],
)
def test_a_reply_that_cannot_be_is_an_error(
    hostile: Hostile, driver: RemoteDriver, told: object, kind: type[Exception]
) -> None:
    hostile.piece = b"abc"
    hostile.frames = [frame(told), frame(CallOver())]
    assert isinstance(outcome(driver), kind)


def test_no_file_of_this_machine_is_opened_on_a_servers_word(hostile: Hostile, driver: RemoteDriver) -> None:
    SLAB.write_bytes(bytes(64))
    try:
        hostile.frames = [frame(SavesHere(0, (RESTING,))), frame(CallOver())]
        assert isinstance(outcome(driver), EngineDied)
        assert SLAB.exists()  # a slab that is mapped loses its name
    finally:
        SLAB.unlink(missing_ok=True)


def test_a_reply_that_says_that_it_is_parked_again_is_an_error(
    hostile: Hostile, driver: RemoteDriver
) -> None:
    again = encode(parked(100, 100))
    head = head_of([again[:15], b"", b"", again[15:]])
    hostile.piece = again
    hostile.frames = [frame(parked(head.nbytes, len(again), again)), frame(CallOver())]
    assert isinstance(outcome(driver), WireError)


def test_an_answer_that_never_ends_is_left_and_one_that_is_compressed_is_not_unpacked(
    hostile: Hostile, driver: RemoteDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "ANSWER_MOST", 3 * MIB)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * MIB

    hostile.other = endless()
    with pytest.raises(ServerError, match=r"answers more than 3\.15 MB, and was left"):
        driver.attach()
    hostile.other = gzip.compress(bytes(64 * MIB))
    hostile.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(LabError, match="serves nothing this version knows"):
        driver.attach()

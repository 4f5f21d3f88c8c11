"""The server extension in a real Jupyter server: who is let in, and whose processes are seen and ended."""

from __future__ import annotations

import dataclasses
import http.cookiejar
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import nnsight_lab
from nnsight_lab.engine import kept
from nnsight_lab.engine.processes import this_owner
from nnsight_lab.wire import machine as wire
from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, MODEL_ENV, OWNER_ENV
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "jupyter_server_config.d/nnsight-lab.json"
GONE = f"{2**22 - 1}:1.00"
NOBODY = 65534

Marked = Callable[..., "subprocess.Popen[bytes]"]


@dataclass
class Jupyter:
    """A running server, and a client of it."""

    url: str
    token: str
    pid: int
    #: Where its user's kept engines are recorded.
    run: Path
    #: Kept from answer to answer where they are asked for, as a browser does.
    cookies: http.cookiejar.CookieJar = field(default_factory=http.cookiejar.CookieJar)

    def ask(
        self,
        path: str,
        method: str = "GET",
        *,
        token: str | None = "",
        cookies: bool = False,
        body: object = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and JSON; `token` None sends none, "" the right one."""
        if token is not None:
            headers["Authorization"] = f"token {token or self.token}"
        data = b"" if body is None and method != "GET" else json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        kept = [urllib.request.HTTPCookieProcessor(self.cookies)] if cookies else []
        opener = urllib.request.build_opener(*kept)
        try:
            with opener.open(request, timeout=30) as answer:
                return answer.status, _json(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())

    def engines(self) -> dict[str, dict[str, Any]]:
        """What the server tells of engines, once its last look is old."""
        status, told = self.ask(f"{wire.ROUTE}/{wire.STATUS}")
        assert status == 200
        return {engine["engine"]: engine for engine in told["engines"]}

    def end(self, engine: str, **how: Any) -> tuple[int, Any]:
        name = urllib.parse.quote(engine, safe="")
        return self.ask(f"{wire.ROUTE}/{wire.ORPHANS}/{name}/{wire.END}", "POST", **how)

    def end_kept(self, engine: str, **how: Any) -> tuple[int, Any]:
        name = urllib.parse.quote(engine, safe="")
        return self.ask(f"{wire.ROUTE}/{wire.KEPT}/{name}/{wire.END}", "POST", **how)

    def log(self, engine: str) -> tuple[int, Any]:
        return self.ask(f"{wire.ROUTE}/{wire.LOG}?{urllib.parse.urlencode({wire.ENGINE: engine})}")


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    folder = tmp_path_factory.mktemp("jupyter")
    config = folder / "config" / CONFIG
    config.parent.mkdir(parents=True)
    shutil.copy(ROOT / "jupyter-config" / CONFIG, config)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}", "--ServerApp.base_url=/a/b/"]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        kept.FOLDER_ENV: str(folder / "run"),
    }
    (folder / "run").mkdir(mode=0o700)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            server = Jupyter(f"http://127.0.0.1:{port}/a/b/", token, process.pid, folder / "run")
            until(lambda: _up(server), 60, "the server's first answer")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert "Uncaught exception" not in (folder / "server.log").read_text()


def _up(server: Jupyter) -> bool:
    try:
        return server.ask("api/status")[0] == 200
    except OSError:
        return False


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Starts processes that carry an engine's mark."""
    started: list[subprocess.Popen[bytes]] = []

    def start(engine: str, owner: str = GONE, log: str = "", user: int | None = None) -> Any:
        marks = {ENGINE_ENV: engine, OWNER_ENV: owner, LOG_ENV: log, MODEL_ENV: "demo"}
        process = subprocess.Popen(["sleep", "600"], env={**os.environ, **marks}, user=user, cwd="/")
        started.append(process)
        until(lambda: "sleep" in "".join(psutil.Process(process.pid).cmdline()), 10, "a marked process")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def seen(jupyter: Jupyter, engine: str) -> dict[str, Any]:
    found = until(lambda: jupyter.engines().get(engine), 10, f"{engine} is told")
    assert isinstance(found, dict)
    return found


def test_who_is_not_let_in_is_told_nothing_and_ends_nothing(jupyter: Jupyter, marked: Marked) -> None:
    orphan = marked("mine")
    for path in (f"{wire.ROUTE}/{wire.STATUS}", f"{wire.ROUTE}/{wire.LOG}?{wire.ENGINE}=mine"):
        for token in (None, "wrong"):
            status, told = jupyter.ask(path, token=token)
            assert status == 403
            assert "mine" not in json.dumps(told)
    for token in (None, "wrong"):
        assert jupyter.end("mine", token=token)[0] == 403
    assert orphan.poll() is None


def test_a_page_of_another_site_with_the_cookie_ends_nothing(jupyter: Jupyter, marked: Marked) -> None:
    orphan = marked("mine")
    # Opening a page with the token gives the cookies that a browser sends along, whoever asks it to.
    jupyter.ask(f"login?token={jupyter.token}", token=None, cookies=True)
    assert jupyter.ask(f"{wire.ROUTE}/{wire.STATUS}", token=None, cookies=True)[0] == 200
    assert jupyter.end("mine", token=None, cookies=True)[0] == 403
    assert orphan.poll() is None
    (mark,) = (cookie.value for cookie in jupyter.cookies if cookie.name == "_xsrf")
    xsrf = jupyter.end("mine", token=None, cookies=True, **{"X-XSRFToken": str(mark)})
    assert xsrf == (200, {"ok": True, "text": "1 process ended."})
    assert until(lambda: orphan.poll() is not None, 5, "the orphan's end")


def test_the_records_are_those_the_page_knows(jupyter: Jupyter, marked: Marked, tmp_path: Path) -> None:
    log = str(tmp_path / "my_main-20260101-101010-1-2.log")
    first, second = marked("mine", log=log), marked("mine", log=log)
    found = seen(jupyter, "mine")
    status, told = jupyter.ask(f"{wire.ROUTE}/{wire.STATUS}")
    assert (told["protocol"], told["version"]) == (wire.PROTOCOL, nnsight_lab.__version__)
    assert set(found) == set(wire.MachineEngine.__dataclass_fields__)
    assert set(told) == set(wire.MachineStatus.__dataclass_fields__)
    assert found["pids"] == sorted([first.pid, second.pid])
    assert (found["kind"], found["name"], found["model"]) == (wire.ORPHAN, "my_main", "demo")
    assert (found["log"], found["kernel_id"]) == (log, "")
    assert found["memory_bytes"] > 0
    assert 0 <= found["age_s"] < 60


def test_an_engine_is_its_kernels_as_long_as_that_lives_and_an_orphan_then(
    jupyter: Jupyter, marked: Marked
) -> None:
    before = {child.pid for child in psutil.Process(jupyter.pid).children()}
    status, kernel = jupyter.ask("api/kernels", "POST", body={"name": "python3"})
    assert status == 201
    (pid,) = {child.pid for child in psutil.Process(jupyter.pid).children()} - before
    engine = marked("held", f"{pid}:{psutil.Process(pid).create_time():.2f}")
    found = seen(jupyter, "held")
    assert (found["kind"], found["owner_pid"], found["kernel_id"]) == (wire.KERNEL, pid, kernel["id"])
    status, answer = jupyter.end("held")
    assert (status, answer["ok"]) == (404, False)
    assert engine.poll() is None

    os.kill(pid, signal.SIGKILL)
    until(lambda: seen(jupyter, "held")["kind"] == wire.ORPHAN, 15, "its engine is an orphan")
    assert seen(jupyter, "held")["kernel_id"] == ""
    assert jupyter.end("held") == (200, {"ok": True, "text": "1 process ended."})
    until(lambda: engine.poll() is not None, 5, "the orphan's end")
    assert "held" not in jupyter.engines()
    jupyter.ask(f"api/kernels/{kernel['id']}", "DELETE")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_an_engine_of_another_user_is_neither_told_nor_ended(jupyter: Jupyter, marked: Marked) -> None:
    theirs, mine = marked("theirs", user=NOBODY), marked("mine")
    seen(jupyter, "mine")
    assert "theirs" not in jupyter.engines()
    assert jupyter.end("theirs")[0] == 404
    assert jupyter.log("theirs")[0] == 404
    # Under one name with mine, too.
    namesake = marked("mine", user=NOBODY)
    assert jupyter.end("mine") == (200, {"ok": True, "text": "1 process ended."})
    until(lambda: mine.poll() is not None, 5, "the orphan's end")
    assert (theirs.poll(), namesake.poll()) == (None, None)


def test_a_kept_engine_is_told_without_a_kernel_and_ended_as_one_only(
    jupyter: Jupyter, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept.FOLDER_ENV, str(jupyter.run))
    server, core = marked("0123456789ab", owner=""), marked("0123456789ab")
    record = kept.Kept(
        "mine", "0123456789ab", "demo", server.pid, 0.0, str(jupyter.run / "0123456789ab.sock"), "", 0.0
    )
    kept.write(kept.process_of(record))
    until(lambda: seen(jupyter, record.engine)["kind"] == wire.KEPT, 10, "it is kept")
    told = seen(jupyter, record.engine)
    assert (told["name"], told["attach"]) == ("mine", "")  # it is not ready yet
    kept.write(dataclasses.replace(kept.process_of(record), ready=True))
    until(lambda: seen(jupyter, record.engine)["attach"] == "%engine attach mine", 10, "it is ready")
    assert jupyter.end(record.engine)[0] == 404
    for token in (None, "wrong"):
        assert jupyter.end_kept(record.engine, token=token)[0] == 403
    for name in ("mine", str(server.pid), "", "..", "*", "a" * 5000):
        assert jupyter.end_kept(name)[0] in (400, 404)
    stranger = marked("stranger")  # an orphan, and no kept engine
    assert jupyter.end_kept("stranger")[0] == 404
    assert [process.poll() for process in (server, core, stranger)] == [None, None, None]
    status, answer = jupyter.end_kept(record.engine)
    assert (status, answer) == (200, {"ok": True, "text": "2 processes ended."})
    until(lambda: server.poll() is not None and core.poll() is not None, 5, "its end")
    assert stranger.poll() is None
    assert record.engine not in jupyter.engines()
    assert list(jupyter.run.glob("*.json")) == []


def test_an_engine_of_which_one_process_has_a_living_kernel_is_not_ended(
    jupyter: Jupyter, marked: Marked
) -> None:
    both = marked("both"), marked("both", this_owner())
    assert jupyter.end("both")[0] == 404
    assert [process.poll() for process in both] == [None, None]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../etc/passwd", "1", "-1", "*", "mine*", "mine\0", "%2e%2e", "a" * 5000, "<b>"],
)
def test_a_hostile_name_ends_nothing_and_reads_nothing(jupyter: Jupyter, marked: Marked, name: str) -> None:
    orphan = marked("mine")
    for status, told in (jupyter.end(name), jupyter.log(name)):
        assert status in (400, 404), told
        assert "root:" not in json.dumps(told)
    status, _ = jupyter.end(str(orphan.pid))
    assert status == 404
    assert orphan.poll() is None
    orphan.kill()
    orphan.wait()


def test_an_end_is_asked_for_by_post_only(jupyter: Jupyter, marked: Marked) -> None:
    orphan = marked("mine")
    assert jupyter.ask(f"{wire.ROUTE}/{wire.ORPHANS}/mine/{wire.END}")[0] == 405
    assert orphan.poll() is None


def test_the_end_of_an_orphans_log_is_read(jupyter: Jupyter, marked: Marked, tmp_path: Path) -> None:
    log = tmp_path / "main-20260101-101010-1-2.log"
    log.write_text("".join(f"line {number} é\n" for number in range(20_000)))
    marked("mine", log=str(log))
    status, answer = jupyter.log("mine")
    lines = answer["text"].splitlines()
    assert (status, lines[-1]) == (200, "line 19999 é")
    assert 1000 < len(lines) < 10_000
    assert lines[0].startswith("line ")


def test_what_is_no_plain_log_of_this_user_is_not_read(
    jupyter: Jupyter, marked: Marked, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.log"
    secret.write_text("secret")
    link, pipe = tmp_path / "link.log", tmp_path / "pipe.log"
    link.symlink_to(secret)
    os.mkfifo(pipe)
    wrong = [str(link), str(pipe), str(tmp_path), str(tmp_path / "none.log"), "secret.log", "/etc/passwd", ""]
    if os.getuid() == 0:
        theirs = tmp_path / "theirs.log"
        theirs.write_text("secret")
        os.chown(theirs, NOBODY, NOBODY)
        wrong.append(str(theirs))
    for number, path in enumerate(wrong):
        marked(f"wrong-{number}", log=path)
        status, answer = jupyter.log(f"wrong-{number}")
        assert (status, answer["ok"]) == (404, False), path
        assert "secret" not in answer["text"]


def test_many_pages_cost_one_look(jupyter: Jupyter) -> None:
    jupyter.engines()
    server = psutil.Process(jupyter.pid)
    began = sum(server.cpu_times()[:2])
    for _ in range(20):
        jupyter.engines()
    assert sum(server.cpu_times()[:2]) - began < 1.0


def test_importing_it_needs_no_models_and_no_kernel() -> None:
    program = (
        "import sys\n"
        "names = {'torch', 'vllm', 'nnsight', 'numpy', 'IPython', 'ipykernel', 'fastapi', 'plotly'}\n"
        "class Refuses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in names:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuses())\n"
        "import time, jupyter_server.base.handlers, jupyter_server.auth.decorator\n"
        "began = time.perf_counter()\n"
        "import nnsight_lab.jupyter_server as extension\n"
        "assert time.perf_counter() - began < 1, 'slow'\n"
        "print(extension._jupyter_server_extension_points())\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == "[{'module': 'nnsight_lab.jupyter_server'}]", answer.stderr

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nnsight_lab.engine import demo
from nnsight_lab.errors import ModelNotFound


class Converter:
    """Stands for the conversion: counts its calls, writes small files, and may wait for a signal first."""

    def __init__(self, hold: threading.Event | None = None) -> None:
        self.calls = 0
        self.started = threading.Event()
        self.hold = hold

    def __call__(self, source: Path, made: Path, say: demo.Progress) -> None:
        self.calls += 1
        self.started.set()
        if self.hold is not None:
            assert self.hold.wait(30)
        (made / "config.json").write_text("{}")
        (made / "model.safetensors").write_bytes(b"weights" * 1000)


class FailsHalfway(Converter):
    def __call__(self, source: Path, made: Path, say: demo.Progress) -> None:
        (made / "model.safetensors").write_bytes(b"wei")
        raise OSError(28, "No space left on device")


@pytest.fixture
def converter(monkeypatch) -> Converter:
    fake = Converter()
    monkeypatch.setattr(demo, "_convert", fake)
    return fake


def wait_for(condition, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def test_the_model_knows_where_the_eiffel_tower_is(made_model):
    # In a process of its own: the tests' process must not hold a model and its imports.
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "t = T.from_pretrained(sys.argv[1]); m = M.from_pretrained(sys.argv[1])\n"
        "assert str(m.dtype) == 'torch.bfloat16', m.dtype\n"
        "i = t('The Eiffel Tower is in the city of', return_tensors='pt')\n"
        "print(t.decode(m.generate(**i, max_new_tokens=4, do_sample=False)[0]))\n"
        "assert t.apply_chat_template([{'role': 'user', 'content': 'Hi'}], tokenize=False)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(made_model)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout


def test_the_second_call_reads_nothing_and_answers_at_once(made_model, monkeypatch):
    monkeypatch.setattr(demo, "_sha256", lambda path: pytest.fail(f"read {path}"))
    started = time.perf_counter()
    assert demo.demo_model() == made_model
    assert time.perf_counter() - started < 0.1  # measured: 0.2 ms


def test_verifying_reads_every_byte_of_a_good_model(made_model):
    assert demo.what_is_wrong(made_model, verify=True) is None


def test_one_changed_byte_in_the_weights_is_found(made_model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(made_model, copy)
    weights = copy / "model.safetensors"
    before = weights.stat()
    with weights.open("r+b") as opened:
        opened.seek(before.st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))
    assert demo.what_is_wrong(copy) == "the SHA-256 of model.safetensors differs"
    # A disk's own fault leaves the time as it was: only --verify sees that.
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert demo.what_is_wrong(copy) is None
    assert demo.what_is_wrong(copy, verify=True) == "the SHA-256 of model.safetensors differs"


def test_a_copied_model_is_read_once_and_then_trusted(empty_cache, converter, monkeypatch):
    path = demo.demo_model()
    os.utime(path / "model.safetensors")
    assert demo.what_is_wrong(path) is None
    monkeypatch.setattr(demo, "_sha256", lambda file: pytest.fail(f"read {file}"))
    assert demo.what_is_wrong(path) is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"short"), "has 5 bytes instead of 7000"),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / demo.RECORD).write_text("{not json"), "cannot be read"),
        (lambda path: (path / demo.RECORD).write_text("[]"), "cannot be read"),
        (lambda path: (path / demo.RECORD).unlink(), "cannot be read"),
        (lambda path: (path / demo.RECORD).write_text(json.dumps({"format": 0})), "of format 0"),
        (lambda path: (path / demo.RECORD).write_text(json.dumps({"format": 1, "files": {}})), "no weights"),
    ],
    ids=["short", "missing", "garbled", "list", "unrecorded", "older", "empty"],
)
def test_a_damaged_model_is_made_again(damage, said, empty_cache, converter):
    path = demo.demo_model()
    damage(path)
    wrong = demo.what_is_wrong(path)
    assert wrong is not None
    assert said in wrong
    lines: list[str] = []
    assert demo.demo_model(lines.append) == path
    assert converter.calls == 2
    assert demo.what_is_wrong(path, verify=True) is None
    assert any("making it again" in line for line in lines)
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_conversion_that_fails_leaves_nothing(empty_cache, monkeypatch):
    monkeypatch.setattr(demo, "_convert", FailsHalfway())
    with pytest.raises(OSError, match="No space left"):
        demo.demo_model()
    assert [entry.name for entry in (empty_cache / "models").iterdir()] == [f"{demo.DEMO_MODEL}.lock"]


def test_two_at_once_make_it_once(empty_cache, monkeypatch):
    hold = threading.Event()
    fake = Converter(hold)
    monkeypatch.setattr(demo, "_convert", fake)
    said: list[str] = []
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(demo.demo_model()))
    second = threading.Thread(target=lambda: found.append(demo.demo_model(said.append)))
    first.start()
    assert fake.started.wait(10)
    second.start()
    wait_for(lambda: any("another process" in line for line in said), 10)
    hold.set()
    first.join(30)
    second.join(30)
    assert found == [demo.demo_model_path()] * 2
    assert fake.calls == 1


def test_a_kill_in_the_middle_leaves_no_half_model_and_the_next_call_sweeps(empty_cache, monkeypatch):
    process = subprocess.Popen(
        [sys.executable, "-m", "nnsight_lab", "model", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stdout is not None
    with process.stdout, process.stderr:
        for line in process.stderr:
            if "turning its weights" in line:
                break
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not demo.demo_model_path().exists()
    stale = list((empty_cache / "models").glob(f".{demo.DEMO_MODEL}-*"))
    assert len(stale) == 1

    fake = Converter()
    monkeypatch.setattr(demo, "_convert", fake)
    path = demo.demo_model()
    assert demo.what_is_wrong(path, verify=True) is None
    assert not stale[0].exists()
    # The orphan notices that nobody waits for it, ends, and does not bring its directory back.
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert list(path.parent.glob(f".{demo.DEMO_MODEL}-*")) == []


def test_without_the_package_the_error_says_what_to_install(empty_cache, monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "llm-no-such-package")
    with pytest.raises(ModelNotFound, match=r"pip install 'nnsight-lab\[demo\]'"):
        demo.demo_model()


def test_a_model_that_is_there_needs_no_package(empty_cache, converter, monkeypatch):
    path = demo.demo_model()
    monkeypatch.setattr(demo, "PACKAGE", "llm-no-such-package")
    assert demo.demo_model() == path


def test_the_failure_of_the_conversion_is_told_in_one_line(empty_cache, tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is no GGUF file" * 100)
    monkeypatch.setattr(demo, "_gguf", lambda: broken)
    with pytest.raises(ModelNotFound, match=r"could not be made \(exit 1\): .*doctor") as raised:
        demo.demo_model()
    assert "\n" not in str(raised.value)


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert demo.cache_dir() == Path.home() / ".cache" / "nnsight_lab"


def test_the_command_prints_the_path_alone_on_stdout(made_model, command):
    answer = command("model", "demo", "--verify")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"{made_model}\n"


def test_the_command_speaks_json(made_model, command):
    said = json.loads(command("model", "demo", "--json").stdout)
    assert said["path"] == str(made_model)
    assert said["verified"] is False


def test_the_list_has_the_demo_model_and_cached_hub_models(made_model, command, tmp_path):
    whole = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    whole.mkdir(parents=True)
    (whole / "model.safetensors").write_bytes(b"x" * 2048)
    (tmp_path / "models--org--config-only" / "snapshots" / "abc").mkdir(parents=True)
    listed = json.loads(command("model", "list", "--json", HF_HUB_CACHE=str(tmp_path)).stdout)
    assert [(model["name"], model["source"]) for model in listed] == [
        (demo.DEMO_MODEL, "demo"),
        ("org/tiny", "hub"),
    ]
    assert listed[1]["bytes"] == 2048
    assert "2.05 kB" in command("model", "list", HF_HUB_CACHE=str(tmp_path)).stdout

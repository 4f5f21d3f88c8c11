"""Peers side by side: what a row says, whoever is missing, wrong, slow or interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nnsight_lab.bench import speed, speed_table
from nnsight_lab.bench.peers import environments, figure, table
from nnsight_lab.bench.peers.child import Ended, lines, reason
from nnsight_lab.bench.peers.environments import Environments
from nnsight_lab.bench.peers.report import Plan, report
from nnsight_lab.bench.peers.runners.measuring import Job, _measured
from nnsight_lab.bench.peers.values import TOLERANCES, difference, same_tokens
from nnsight_lab.bench.peers.works import works
from nnsight_lab.cli.main import main
from nnsight_lab.errors import BenchRefused

ROOT = Path(__file__).resolve().parents[2]


def some(*names: str, scale: int = 64) -> list[Any]:
    return [work for work in works(scale) if work.name in names]


# ---- the works


def test_every_work_has_one_beside_it_that_asks_for_nothing() -> None:
    every = {work.name: work for work in works()}
    for work in every.values():
        plain = every[work.plain]
        same = ("prompts", "prompt_tokens", "new_tokens")
        assert [getattr(work, name) for name in same] == [getattr(plain, name) for name in same]


def test_the_prompts_of_a_work_are_different_and_of_tokens_that_the_model_has() -> None:
    for work in works():
        ids = work.ids(258)
        assert len({tuple(prompt) for prompt in ids}) == work.prompts
        assert all(0 <= token < 258 for prompt in ids for token in prompt)


def test_scale_takes_prompts_from_the_many_and_not_from_the_streams() -> None:
    small = {work.name: work.prompts for work in works(16)}
    assert (small["w1_save"], small["w2_all"], small["streams8_save"], small["single_save"]) == (8, 4, 8, 1)


# ---- arguments


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers=nsight"], "nnsight"),
        (["--works=w1_stear"], "w1_steer"),
        (["--figure=out.pdf"], ".html, .png or .json"),
        (["--packages=vllm-lens=/nowhere/at/all"], "PEER=DIR"),
        (["--from=/nowhere/at/all.json"], "--json"),
        (["--kept"], "--folder DIR"),
        (["--model=/nowhere/at/all"], "no model"),
        (["notanoption"], "name=value"),
    ],
)
def test_a_wrong_word_is_one_line_that_says_what_is_right(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, llama_path: Path
) -> None:
    head = ["bench", "peers", f"--environments={tmp_path}"]
    model = [] if words[0].startswith("--model") else [f"--model={llama_path}"]
    assert main([*head, *model, *words]) == 1
    assert said in capsys.readouterr().err


# ---- environments


def test_a_peer_that_is_not_installed_has_rows_that_say_how(tmp_path: Path, llama_path: Path) -> None:
    peers = environments.chosen("vllm-lens,transformer-lens")
    asked = some("single_nothing", "w2_all")
    found = report(Plan(str(llama_path), peers, asked, Environments(tmp_path)))
    assert [(row["peer"], row["work"]) for row in found["rows"]] == [
        (peer.name, work.name) for peer in peers for work in asked
    ]
    for row in found["rows"]:
        assert row["seconds"] is None
        assert row["note"] == "not installed: nnsight-lab bench peers --setup"
        assert row["version"]


def test_an_environment_of_other_versions_counts_as_missing(tmp_path: Path) -> None:
    (peer,) = environments.chosen("vllm-lens")
    folder = tmp_path / peer.name
    (folder / "bin").mkdir(parents=True)
    stamp = {"requirements": list(peer.requirements), "beside": sys.prefix}
    (folder / "peer.json").write_text(json.dumps(stamp))
    assert Environments(tmp_path).python(peer) == folder / "bin" / "python"
    (folder / "peer.json").write_text(json.dumps({**stamp, "requirements": ["vllm-lens==0.1"]}))
    assert Environments(tmp_path).python(peer) is None
    (folder / "peer.json").write_text(json.dumps({**stamp, "beside": "another"}))
    assert Environments(tmp_path).python(peer) is None


def test_a_peer_sees_this_package_and_no_plugin_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "inherited")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    anchor = tmp_path / "anchor"
    known = environments.peers()
    # An environment of its own: nothing of what is installed beside this package.
    own = Environments(tmp_path).surroundings(known["vllm-lens"], anchor)
    assert own["PYTHONPATH"] == str(anchor)
    assert own["VLLM_PLUGINS"] == "activations"
    # A folder of packages, with this Python: before everything else.
    given = Environments(tmp_path, {"vllm-lens": theirs}).surroundings(known["vllm-lens"], anchor)
    assert given["PYTHONPATH"].split(os.pathsep) == [str(theirs), str(anchor), "inherited"]
    for name in ("plain", "nnsight", "transformer-lens"):
        assert Environments(tmp_path).surroundings(known[name], anchor)["VLLM_PLUGINS"] == ""


def test_runners_need_nothing_but_their_peer() -> None:
    # As in a peer's environment: this package by a link, without what is installed beside it.
    code = (
        "import sys\n"
        "from nnsight_lab.bench.peers.runners import nnsight_alone, plain, transformer_lens, vllm_lens\n"
        "print([n for n in sys.modules if 'site-packages' in str(getattr(sys.modules[n], '__file__', ''))])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert answer.stdout.strip() == "[]", answer.stderr


# ---- values


def test_a_stream_without_its_residual_is_seen_and_rounding_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    residual, hidden = torch.randn(3, 16, 64), torch.randn(3, 16, 64)
    stream = residual + hidden
    stream[0, 0, 0] = 5000.0  # as residual streams have them: it must not hide the rest

    def kept(name: str, *values: torch.Tensor) -> Path:
        torch.save(list(values), tmp_path / name)
        return tmp_path / name

    right = kept("right", stream, stream)
    assert difference(kept("same", stream, stream), right) == 0
    rounded = kept("rounded", stream, stream.bfloat16().float())
    assert difference(rounded, right) < TOLERANCES["bfloat16"] / 10
    assert difference(kept("hidden", stream, hidden), right) > 2 * max(TOLERANCES.values())
    assert difference(kept("shifted", stream, stream.roll(1, 0)), right) > 2 * max(TOLERANCES.values())
    assert difference(kept("less", stream, stream[:, 1:]), right) == float("inf")
    assert difference(kept("nan", stream, stream * float("nan")), right) == float("inf")


def test_tokens_are_the_same_up_to_the_first_that_is_not() -> None:
    assert same_tokens([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 1
    assert same_tokens([[1, 9, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]) == 5 / 8


# ---- a peer's work


class _Here:
    """Brings home what is given, and nothing else."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def tokens(self, prompt: int) -> list[int]:
        return [1]

    def values(self, prompt: int) -> Any:
        return self._values


@dataclasses.dataclass
class FakePeer:
    """A peer whose call takes a time for each prompt, or fails."""

    each_s: float = 0.0
    fails: bool = False
    reason: str = ""

    def cannot(self, what: str) -> str:
        return self.reason

    def note(self, what: str) -> str:
        return ""

    @contextlib.contextmanager
    def prepared(self, what: str, new_tokens: int, *, check: bool = False) -> Iterator[Callable[..., Any]]:
        def call(prompts: list[list[int]]) -> _Here:
            if self.fails:
                raise ValueError("out of everything\nand more")
            time.sleep(self.each_s * len(prompts))
            return _Here(torch.zeros(4, 8))

        yield call


def job(folder: Path, model: Path, **changed: Any) -> Job:
    given: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "rounds": 2, "works": (), "options": {},
        "results": str(folder / "lines"), "values": str(folder), "limit_s": 60.0,
    }  # fmt: skip
    return Job(**{**given, **changed})


def test_what_a_peer_cannot_do_fails_at_or_would_take_too_long_for_is_told(
    tmp_path: Path, llama_path: Path
) -> None:
    (work,) = some("w2_all", scale=2)
    here = job(tmp_path, llama_path)
    assert _measured(FakePeer(), work, here)["seconds"]
    assert _measured(FakePeer(reason="has no layers"), work, here) == {"note": "cannot: has no layers"}
    assert _measured(FakePeer(fails=True), work, here) == {"note": "failed: ValueError: out of everything"}
    slow = _measured(FakePeer(each_s=0.05), work, job(tmp_path, llama_path, limit_s=0.5))
    assert "seconds" not in slow
    assert slow["note"].startswith("not run: it would take about")


# ---- processes


def test_a_runner_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    code = "raise ValueError('no such thing')"
    with pytest.raises(Ended, match="ValueError: no such thing"):
        list(lines([sys.executable, "-c", code], os.environ, tmp_path / "lines", tmp_path / "log", 60))


def test_the_root_cause_is_told_and_not_that_there_is_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "x\n(EngineCore pid=7) ERROR OSError: No space left\nfoo\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert reason(log) == "OSError: No space left"


def test_a_runner_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    # A grandchild in a session of its own, as an engine's process may be.
    code = (
        "import subprocess, sys, time, json\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        "open(sys.argv[1], 'a').write(json.dumps({'pid': child.pid}) + '\\n')\n"
        "time.sleep(600)\n"
    )
    results = tmp_path / "lines"
    seen: list[int] = []
    told = lines([sys.executable, "-c", code, str(results)], os.environ, results, tmp_path / "log", 3)
    with pytest.raises(Ended, match="ended after its 3 s"):
        seen.extend(line["pid"] for line in told)
    assert len(seen) == 1
    assert not psutil.pid_exists(seen[0]) or psutil.Process(seen[0]).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_the_program_ends_the_runner(by: signal.Signals, llama_path: Path) -> None:
    program = [sys.executable, "-m", "nnsight_lab", "bench", "peers", f"--model={llama_path}", "--peers=hf"]
    process = subprocess.Popen(
        program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "hf: starting" in line:
            break
    deadline = time.monotonic() + 60
    runners: list[psutil.Process] = []
    while not runners and time.monotonic() < deadline:
        runners = [
            child
            for child in psutil.Process(process.pid).children()
            if "peers.runners.hf" in str(child.cmdline())
        ]
    assert len(runners) == 1
    process.send_signal(by)
    assert process.wait(timeout=60) == 130
    assert "interrupted" in process.stderr.read()
    process.stderr.close()
    assert not runners[0].is_running()


def test_who_is_done_is_not_run_again(tmp_path: Path, llama_path: Path) -> None:
    # Neither of the two is installed, so whatever they told is of an earlier time.
    peers = environments.chosen("vllm-lens,transformer-lens")
    asked = some("w2_nothing")
    ready = {
        "ready": True,
        "version": "9.9",
        "versions": {},
        "start_s": 1.0,
        "dtype": "float32",
        "device": "cpu",
    }
    line = {"work": "w2_nothing", "note": "", "tokens": [[1]], "values": None, "seconds": [2.0]}
    for peer, told in ((peers[0], [ready, line, {"done": True}]), (peers[1], [ready, line])):
        folder = tmp_path / "kept" / peer.name
        folder.mkdir(parents=True)
        (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, told)) + "\n")
        (folder / "job.json").write_text(json.dumps({"works": [dataclasses.asdict(work) for work in asked]}))
    plan = Plan(str(llama_path), peers, asked, Environments(tmp_path), folder=tmp_path / "kept")
    rows = {row["peer"]: row for row in report(plan)["rows"]}
    assert (rows["vllm-lens"]["seconds"], rows["vllm-lens"]["version"]) == (2.0, "9.9")
    assert rows["transformer-lens"]["note"].startswith("not installed")  # it had not got to its end
    # Nobody is run, and what it told until then is told.
    kept = {row["peer"]: row for row in report(dataclasses.replace(plan, run=False))["rows"]}
    assert [kept[peer.name]["seconds"] for peer in peers] == [2.0, 2.0]


def test_the_speed_of_wrong_values_is_not_told(tmp_path: Path, llama_path: Path) -> None:
    peers = environments.chosen("hf,plain,vllm-lens,transformer-lens")
    asked = some("w2_nothing", "w2_save")
    right = torch.randn(4, 8)
    kept = {
        "hf": (right, [[1, 2]], 4.0),
        "plain": (None, [[1, 2]], 2.0),
        "vllm-lens": (right + 1e-6, [[1, 3]], 3.0),
        "transformer-lens": (right.roll(1, 0), [[1, 2]], 1.0),
    }
    for name, (values, tokens, seconds) in kept.items():
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "w2_save.pt"
        torch.save([values], path)
        ready = {
            "ready": True,
            "version": "1",
            "versions": {},
            "start_s": 1,
            "dtype": "float32",
            "device": "cpu",
        }
        plain = {"work": "w2_nothing", "note": "", "tokens": tokens, "values": None, "seconds": [seconds]}
        saves = {**plain, "work": "w2_save", "values": str(path)}
        if values is None:
            saves = {"work": "w2_save", "note": "cannot: brings nothing home"}
        told = [ready, plain, saves, {"done": True}]
        (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, told)) + "\n")
        (folder / "job.json").write_text(json.dumps({"works": [dataclasses.asdict(work) for work in asked]}))
    plan = Plan(str(llama_path), peers, asked, Environments(tmp_path), folder=tmp_path, run=False)
    rows = {(row["peer"], row["work"]): row for row in report(plan)["rows"]}
    assert rows["hf", "w2_save"]["ratio"] == 2.0  # to plain vLLM's, with nothing asked
    assert (rows["plain", "w2_save"]["seconds"], rows["plain", "w2_save"]["note"][:7]) == (None, "cannot:")
    lens = rows["vllm-lens", "w2_save"]
    assert lens["ratio"] == 1.5
    # It was another version than the pinned one, of which is known what it asks for.
    assert lens["note"] == "50% of the new tokens are HF's"
    assert 0 < lens["max_difference"] < 1e-4
    wrong = rows["transformer-lens", "w2_save"]
    assert (wrong["seconds"], wrong["ratio"], wrong["tokens_per_second"]) == (None, None, None)
    assert wrong["note"].startswith("wrong values:")
    assert rows["transformer-lens", "w2_nothing"]["ratio"] == 0.5


# ---- what is shown


def told(**changed: Any) -> dict[str, Any]:
    """A report of three peers: one whose values are wrong, one that cannot."""
    asked = some("w2_nothing", "w2_all")

    def row(peer: str, work: str, ratio: float | None, note: str = "") -> dict[str, Any]:
        return {
            "peer": peer, "version": "1.0", "work": work, "seconds": ratio, "rounds": 3, "ratio": ratio,
            "tokens_per_second": 10.0, "max_difference": 1e-6, "same_tokens": 1.0, "note": note,
        }  # fmt: skip

    return {
        "date": "2030-01-01", "model": "demo", "dtype": "float32", "ratio_to": "plain vLLM", "drift": 1.02,
        "machine": {"cpu": "a processor", "cores": 2, "gpu": None}, "versions": {"torch": "2", "python": "3"},
        "works": {work.name: dataclasses.asdict(work) for work in asked},
        "rows": [
            row("plain", "w2_nothing", 1.0), row("plain", "w2_all", None, "cannot: brings nothing home"),
            row("nnsight-lab", "w2_nothing", 1.01), row("nnsight-lab", "w2_all", 1.2),
            row("nnsight", "w2_nothing", 1.5), row("nnsight", "w2_all", None, "wrong values: rows differ"),
        ],
        **changed,
    }  # fmt: skip


def test_the_table_has_every_work_and_peer_and_says_what_has_no_number() -> None:
    text = table.markdown(told(), "nnsight-lab bench peers")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [5] * 4
    assert "plain vLLM | nnsight-lab | nnsight alone" in rows[0]
    assert rows[3] == "| W2: all layers saved | cannot | 1.20 | wrong |"
    for said in ("2030-01-01", "a processor", "torch 2", "brings nothing home (w2_all)", "1.02 times"):
        assert said in text
    assert "nnsight-lab bench peers" in text
    assert "Others used the machine" not in text
    busy = told(machine={"cpu": "a processor", "cores": 2, "gpu": None, "load": 7.5}, note="Half asleep.")
    assert "Half asleep. Others used the machine: its load was 7.5" in table.markdown(busy, "")


def test_the_figure_has_a_bar_for_each_number_and_none_for_what_was_wrong() -> None:
    drawn = figure.figure(told())
    bars = {bar.name: bar for bar in drawn.data}
    assert set(bars) == {"nnsight-lab", "nnsight alone"}  # plain vLLM is the line at 1
    assert [bar is None for bar in bars["nnsight alone"].y] == [False, True]
    assert drawn.layout.yaxis.type == "log"
    # A bar begins at 1 and ends at its ratio.
    assert [bars["nnsight-lab"].base + height for height in bars["nnsight-lab"].y] == pytest.approx(
        [1.01, 1.2]
    )
    assert len({bar.marker.color for bar in bars.values()}) == 2


def test_the_page_of_our_engine_has_every_ratio_that_was_measured() -> None:
    found = {field: 1.0 + number / 8 for number, field in enumerate(speed._RATIOS)}
    shape = {"prompts": 4, "long_prompts": 2, "rounds": 3, "versions": {"vllm": "0.32.0"}}
    text = speed_table.markdown({**found, **shape}, "nnsight-lab bench engine --speed", "a busy machine")
    assert [line.count("|") for line in text.splitlines() if line.startswith("|")] == [3] * (2 + len(found))
    for said in ("vllm 0.32.0", "a busy machine", "| 1.12 |", "nnsight-lab bench engine --speed"):
        assert said in text


def test_an_earlier_report_is_drawn_and_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found.json").write_text(json.dumps(told()))
    for ending in (".json", ".html"):
        words = [f"--from={tmp_path / 'found.json'}", f"--figure={tmp_path / 'f'}{ending}"]
        assert main(["bench", "peers", *words, f"--table={tmp_path / 'peers.md'}"]) == 0
    assert "all layers saved" in capsys.readouterr().out
    assert json.loads((tmp_path / "f.json").read_text())["data"]
    assert "plotly" in (tmp_path / "f.html").read_text()
    assert (tmp_path / "peers.md").read_text().startswith("# Peers side by side")


@pytest.mark.browser
def test_the_figure_is_a_picture_where_a_browser_is(tmp_path: Path, chromium: str) -> None:
    figure.write(told(), tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchRefused):
        figure.write(told(), tmp_path / "f.gif")


# ---- all of it


@pytest.mark.engine
def test_we_and_hugging_face_bring_the_same_values_home(
    tmp_path: Path, llama_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two threads that wait for each other at every operation are slow where others have the cores.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--peers=hf,nnsight-lab", "--works=single_steer,w2_all", "--scale=32", "--rounds=1"]
    code = main(["bench", "peers", f"--model={llama_path}", f"--rows={tmp_path / 'rows'}", "--json", *words])
    seen = capsys.readouterr()
    assert code == 0, seen.err
    found = json.loads(seen.out)
    assert found["ratio_to"] == "HF transformers + hooks"
    rows = {(row["peer"], row["work"]): row for row in found["rows"]}
    # Those that were asked for, and what they are compared with.
    works_seen = {"single_nothing", "single_steer", "w2_nothing", "w2_all"}
    assert set(rows) == {(peer, work) for peer in ("hf", "nnsight-lab") for work in works_seen}
    for (peer, work), row in rows.items():
        assert row["seconds"], row
        assert row["ratio"], row
        if peer == "nnsight-lab":
            assert row["same_tokens"] == 1, row
            assert (row["max_difference"] is None) == work.endswith("_nothing"), row
            assert (row["max_difference"] or 0) < TOLERANCES["float32"], row
    assert len((tmp_path / "rows").read_text().splitlines()) == len(rows)
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"]

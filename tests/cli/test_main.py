import subprocess
import sys
from importlib import metadata

import pytest

from nnsight_lab.cli import main as cli
from nnsight_lab.errors import ModelNotFound


def test_help_names_every_command(command):
    answer = command("--help")
    assert answer.returncode == 0
    for name in ("doctor", "demo", "model", "export", "freeze"):
        assert f"\n  {name} " in answer.stdout or f"\n    {name} " in answer.stdout


@pytest.mark.parametrize("line", ["doctor", "demo", "model", "model demo", "model list", "export", "freeze"])
def test_every_command_has_help_of_its_own(line, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*line.split(), "--help"])
    assert left.value.code == 0
    assert f"usage: nnsight-lab {line}" in capsys.readouterr().out


def test_help_waits_for_no_heavy_import():
    code = (
        "import sys\nfrom nnsight_lab.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'vllm', 'nnsight', 'IPython', 'nbclient'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_the_version_is_the_distribution_s(command):
    answer = command("--version")
    assert answer.stdout.strip() == f"nnsight-lab {metadata.version('nnsight-lab')}"


@pytest.mark.parametrize("line", ["", "nonsense", "model", "export"])
def test_a_wrong_command_line_is_answered_with_usage_and_2(line, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(line.split())
    assert left.value.code == 2
    assert "usage: nnsight-lab" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_1(monkeypatch, capsys):
    def refuse(_arguments):
        raise ModelNotFound("no such model: look again")

    monkeypatch.setattr(cli.doctor, "run", refuse)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "nnsight-lab: no such model: look again\n"


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    def interrupt(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "run", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "nnsight-lab: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error():
    shell = f"'{sys.executable}' -m nnsight_lab doctor | true; exit ${{PIPESTATUS[0]}}"
    answer = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert answer.returncode == 0
    assert "Traceback" not in answer.stderr
    assert "BrokenPipe" not in answer.stderr

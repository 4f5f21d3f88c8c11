"""The files that `nnsight-lab serve --example` prints: systemd reads the unit, and all agree."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from traitlets.config import PyFileConfigLoader

from nnsight_lab.cli.main import build_parser, main
from nnsight_lab.cli.serve import EXAMPLES
from nnsight_lab.wire.serving import HUB_SERVICE

SCOPE = f"access:services!service={HUB_SERVICE}"


@pytest.fixture
def printed(capsys):
    def example(name):
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--example", name])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return example


def served(words):
    """How `nnsight-lab` reads a command of an example."""
    arguments, more = build_parser().parse_known_args(words)
    assert arguments.hub
    flags = dict(zip(more[::2], more[1::2], strict=True))
    return flags["--port"], arguments.admin_group


def test_every_example_can_be_printed_and_one_there_is_not_is_refused(printed, capsys):
    for name, file in EXAMPLES.items():
        assert f"nnsight-lab serve --example {name}" in printed(name), file
    with pytest.raises(SystemExit):
        main(["serve", "--example", "apache"])
    assert "invalid choice: 'apache'" in capsys.readouterr().err


def test_jupyterhub_reads_its_sample(printed, tmp_path):
    (tmp_path / "jupyterhub_config.py").write_text(printed("hub"))
    config = PyFileConfigLoader("jupyterhub_config.py", path=str(tmp_path)).load_config()
    service = config.JupyterHub.services[0]
    assert service["name"] == HUB_SERVICE
    assert "command" not in service  # a Hub exits where one that it starts takes its minutes
    assert config.Spawner.environment["NNSIGHT_LAB_URL"].endswith(f"/services/{HUB_SERVICE}")
    assert SCOPE in config.Spawner.server_token_scopes
    role = config.JupyterHub.load_roles[0]
    assert role["scopes"] == [SCOPE]
    assert set(role["groups"]) == set(config.JupyterHub.load_groups)
    # One secret for every start of the Hub, and nobody else needs it.
    again = PyFileConfigLoader("jupyterhub_config.py", path=str(tmp_path)).load_config()
    assert again.JupyterHub.services[0]["api_token"] != service["api_token"]


def test_systemd_reads_the_unit(printed, tmp_path):
    text = printed("systemd")
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    service = unit["Service"]
    command = shlex.split(service["ExecStart"])
    assert served(command[1:]) == ("8100", ["nnsight-lab-admins"])
    # Whatever way the server ends, nothing of the engine stays; and it can gain no rights.
    assert service["KillMode"] == "mixed"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert "JUPYTERHUB_API_TOKEN" not in text
    if shutil.which("systemd-analyze") is None:
        return
    path = tmp_path / "nnsight-lab.service"
    path.write_text(text.replace(command[0], sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in checked.stderr.splitlines() if "nnsight-lab.service" in line]
    assert ours == []


def test_the_container_and_the_chart_say_the_same(printed):
    container = yaml.safe_load(printed("docker"))["services"][HUB_SERVICE]
    values, deployment, service, policy = yaml.safe_load_all(printed("kubernetes"))
    pod = deployment["spec"]["template"]
    (engine,) = pod["spec"]["containers"]
    for words in (container["command"], engine["args"]):
        assert served(words) == ("8100", ["nnsight-lab-admins"])
    assert set(values["hub"]["services"]) == {HUB_SERVICE}
    assert values["hub"]["services"][HUB_SERVICE]["url"] == f"http://{service['metadata']['name']}:8100"
    assert values["hub"]["loadRoles"][HUB_SERVICE]["scopes"] == [SCOPE]
    assert SCOPE in values["hub"]["config"]["Spawner"]["server_token_scopes"]
    labels = pod["metadata"]["labels"].items()
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert not re.search(r"token", str(container["environment"]), re.IGNORECASE)
    assert Path(values["singleuser"]["extraEnv"]["NNSIGHT_LAB_URL"]).name == HUB_SERVICE

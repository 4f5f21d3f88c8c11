"""`nnsight-lab serve` where it cannot run: one line, before anything is loaded."""

import json

import pytest

from nnsight_lab.cli.main import main


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    for name in ("NNSIGHT_LAB_TOKEN", "JUPYTERHUB_API_TOKEN", "JUPYTERHUB_API_URL"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys, *words):
    """The line that says why."""
    assert main(["serve", "demo", *words]) == 1
    return capsys.readouterr().err


def test_without_anybody_it_is_told_how_users_are_told_apart(capsys):
    line = refused(capsys)
    assert line.startswith("nnsight-lab: Nobody could be told apart")
    assert line.count("\n") == 1


def test_a_hub_needs_its_address(capsys):
    assert "--hub needs JUPYTERHUB_API_URL" in refused(capsys, "--hub")


@pytest.mark.parametrize("words", [("--tokens", "tokens.json"), ("--uds", "lab.sock")])
def test_a_hub_alone_tells_users(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.json").write_text("{}")
    assert "leave --tokens and --uds out" in refused(capsys, "--hub", *words)


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"a": 1})])
def test_a_file_of_tokens_that_is_none_is_refused(capsys, tmp_path, text):
    path = tmp_path / "tokens.json"
    path.write_text(text)
    assert str(path) in refused(capsys, "--tokens", str(path))


@pytest.mark.parametrize("limit", ["requsts=3", "requests", "requests=-1", "requests=many"])
def test_a_limit_that_there_is_not_is_refused(capsys, monkeypatch, limit):
    monkeypatch.setenv("NNSIGHT_LAB_TOKEN", "0123456789abcdef")
    assert "is not NAME=N" in refused(capsys, "--limit", limit)


@pytest.mark.parametrize("form", ["--uds={}", "--uds {}"])
def test_a_socket_that_others_could_reach_is_refused(capsys, tmp_path, form):
    tmp_path.chmod(0o755)
    line = refused(capsys, *form.format(tmp_path / "lab.sock").split(" "))
    assert "can be entered by others" in line
    assert "There is no folder" in refused(capsys, *form.format(tmp_path / "none" / "lab.sock").split(" "))


def test_a_short_token_is_refused_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setenv("NNSIGHT_LAB_TOKEN", "short")
    assert "at least 16 characters" in refused(capsys)


def test_without_settings_no_guard_is_made():
    """A server that vLLM would start without one does not start."""
    from nnsight_lab.errors import ServeRefused
    from nnsight_lab.server import command
    from nnsight_lab.server.middleware import ServedGuard

    assert not command._left
    with pytest.raises(ServeRefused, match="loaded by `nnsight-lab serve` only"):
        ServedGuard(None)
    assert "--middleware=nnsight_lab.server.middleware.ServedGuard" in command.arguments("demo", [])

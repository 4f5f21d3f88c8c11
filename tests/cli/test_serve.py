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


@pytest.mark.parametrize("held", ["", "short", None])
def test_a_token_for_metrics_is_a_token(capsys, monkeypatch, tmp_path, held):
    monkeypatch.setenv("NNSIGHT_LAB_TOKEN", "0123456789abcdef")
    path = tmp_path / "metrics.token"
    if held is not None:
        path.write_text(held)
    assert str(path) in refused(capsys, "--metrics-token", str(path))


@pytest.mark.parametrize("flag", ["--drain-s", "--step-limit", "--sleep-after"])
@pytest.mark.parametrize("value", ["-1", "nan", "soon", "inf"])
def test_a_time_that_is_none_is_refused(capsys, flag, value):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo", f"{flag}={value}"])
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


def test_an_engine_on_a_cpu_is_not_put_to_sleep():
    """VLLM's would report that it sleeps, and hold every byte."""
    from vllm.platforms import current_platform

    from nnsight_lab.errors import ServeRefused
    from nnsight_lab.server.command import Settings, arguments

    if not current_platform.is_cpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ServeRefused, match="frees memory of a GPU"):
        arguments("demo", [], Settings(sleep_after_s=60.0))


def test_users_take_turns_unless_there_is_one():
    from nnsight_lab.server.command import Settings, arguments

    assert "--scheduling-policy=priority" in arguments("demo", [], Settings(level="team"))
    assert "--scheduling-policy=priority" not in arguments("demo", [], Settings(level="solo"))


def test_without_settings_no_guard_is_made():
    """A server that vLLM would start without one does not start."""
    from nnsight_lab.errors import ServeRefused
    from nnsight_lab.server import command
    from nnsight_lab.server.middleware import ServedGuard

    assert not command._left
    with pytest.raises(ServeRefused, match="loaded by `nnsight-lab serve` only"):
        ServedGuard(None)
    assert "--middleware=nnsight_lab.server.middleware.ServedGuard" in command.arguments("demo", [])


def test_a_served_engine_on_a_gpu_replays_graphs_that_stop_at_taps_unless_it_is_to_be_eager(monkeypatch):
    """VLLM's own default, compiled and without taps, would hand nothing to any block."""
    from vllm.platforms import current_platform

    from nnsight_lab.server import replaying
    from nnsight_lab.server.command import arguments

    def told(*given):
        words = arguments("demo", given)
        additional = next(word for word in words if word.startswith("--additional-config="))
        return words, json.loads(additional.partition("=")[2]).get("nnsight_taps")

    assert told()[1] is None
    assert "--enforce-eager" in told()[0]
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    words, taps = told()
    assert taps == ["decoder layers"]
    assert '--compilation-config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}' in words
    assert "--enforce-eager" not in words
    words, taps = told("--enforce-eager")
    assert taps is None
    assert not any(word.startswith("--compilation-config") for word in words)
    assert sum(word.startswith("--compilation-config") for word in told("--compilation-config={}")[0]) == 1
    environment = {}
    replaying.surroundings(environment, ["--enforce-eager"], on_cpu=False)
    assert environment == {}
    replaying.surroundings(environment, [], on_cpu=False)
    assert environment == {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}

"""Kept engines from a terminal, without one: what is refused, and flags as options and back."""

import pytest

from nnsight_lab.cli.keep import options_of
from nnsight_lab.cli.main import main
from nnsight_lab.engine import kept
from nnsight_lab.engine.keeping import flags, plain_options
from nnsight_lab.errors import CellUsageError, ServeRefused


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv(kept.FOLDER_ENV, str(tmp_path))
    return tmp_path


def test_where_none_is_kept_it_is_said_how_one_is(capsys):
    assert main(["kept"]) == 0
    assert "nnsight-lab serve MODEL --keep" in capsys.readouterr().out
    assert main(["kept", "--stop", "main"]) == 1
    assert capsys.readouterr().err.startswith("nnsight-lab: You keep no engine here")


@pytest.mark.parametrize(
    "words",
    [
        ["--keep", "--hub"],
        ["--keep", "--limit", "requests=3"],
        ["--keep", "--port", "8000"],
        ["--keep", "--uds=/tmp/x"],
        ["--keep", "a b"],
        ["--keep", "main", "--idle-minutes", "-1"],
        ["--keep", "main", "stray"],
        ["--idle-minutes", "5"],
        ["--keep", "--max-model-lem", "512"],
    ],
)
def test_what_a_kept_engine_cannot_be_is_one_line_before_anything_is_started(capsys, folder, words):
    assert main(["serve", "demo", *words]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "Traceback" not in line
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--max-model-len", "512"], {"max_model_len": 512}),
        (["--max-model-len=512"], {"max_model_len": 512}),
        (["--enable-lora", "--dtype", "float32"], {"enable_lora": True, "dtype": "float32"}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--lora-modules", "a=/x", "b=/y"], {"lora_modules": ["a=/x", "b=/y"]}),
        (["--hf-overrides", '{"a": {"b": 1}}'], {"hf_overrides": {"a": {"b": 1}}}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
    ],
)
def test_flags_are_options_and_options_flags(words, options):
    assert options_of(words) == options
    assert options_of([word for word in flags(options) if "--limit" not in word]) == {
        "disable_uvicorn_access_log": True,
        **options,
    }


def test_a_stray_word_belongs_to_no_flag():
    with pytest.raises(ServeRefused, match="'stray' is no flag"):
        options_of(["stray", "--x"])


@pytest.mark.parametrize(
    "options", [{"taps": ("a",)}, {"spill_budget": "1GB"}, {"hf_overrides": object()}, {"x": {1, 2}}]
)
def test_an_option_that_no_command_line_says_is_refused(options):
    with pytest.raises(CellUsageError, match="kept"):
        plain_options(options)


def test_a_save_budget_becomes_the_servers_limit():
    assert "--limit=saved_bytes=100000000" in flags({"save_budget": "100MB"})

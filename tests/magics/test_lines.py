from __future__ import annotations

from typing import Any

import pytest

from nnsight_lab.engine import kept
from nnsight_lab.errors import CellUsageError, EngineNotStarted, EngineStartFailed, UnknownEdit
from nnsight_lab.magics.arguments import evaluate, expression, split_words, text_expression
from tests.magics import fakes


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("512", "512"),
        ("-1.5e3", "-1.5e3"),
        ("bfloat16", "'bfloat16'"),
        ("org/model-1", "'org/model-1'"),
        ('"a b"', '"a b"'),
        ("[1,2]", "[1,2]"),
        ('{"a": 1}', '{"a": 1}'),
        ("true", "True"),
        ("None", "None"),
        ("$size", "size"),
        ("{size * 2}", "size * 2"),
        ("2/3", "'2/3'"),
        ("it's", repr("it's")),
    ],
)
def test_values_are_literals_else_variables_else_strings(word: str, source: str) -> None:
    assert expression(word) == source


def test_a_comment_ends_a_line() -> None:
    assert split_words("write run/first  # and its labels, 'it") == ["write", "run/first"]
    assert split_words("# all of it is one") == []
    assert split_words("write run#1 '# x' {'#': 1}") == ["write", "run#1", "'# x'", "{'#': 1}"]


def test_a_name_or_path_may_have_variables_in_it() -> None:
    known = {"folder": "/tmp/x", "n": 3}
    for word, meant in {
        "{folder}/tour": "/tmp/x/tour",
        "$folder/tour": "/tmp/x/tour",
        "{folder}": "/tmp/x",
        "$folder": "/tmp/x",
        "run-{n + 1}-$n.st": "run-4-3.st",
        "it's/{n}": "it's/3",
        "run/first": "run/first",
        "a{b": "a{b",
        "{}x": "{}x",
        "{a b}/$n": "{a b}/3",
        "$5": "$5",
        "3": "3",
    }.items():
        assert evaluate(text_expression(word), dict(known)) == meant, word


def test_words_are_split_outside_quotes_and_brackets() -> None:
    assert split_words("""demo a="x y", b={"k": [1, 2]} c='it\\'s'""") == [
        "demo",
        'a="x y"',
        'b={"k": [1, 2]}',
        "c='it\\'s'",
    ]


def test_starting_an_engine_binds_engine_and_model(run: Any, shell: Any, lab: fakes.Lab) -> None:
    shell.user_ns["size"] = 256
    ran = run(
        '%engine start demo max_model_len=$size mode=async dtype=float32, overrides={"a": 1} eager=true'
    )
    assert ran.error is None
    assert lab.started == [
        (
            "demo",
            {
                "name": "main",
                "mode": "async",
                "restart": False,
                "max_model_len": 256,
                "dtype": "float32",
                "overrides": {"a": 1},
                "eager": True,
            },
        )
    ]
    assert shell.user_ns["engine"] is lab.get_engine()
    assert shell.user_ns["model"] is lab.get_engine().model
    assert ran.lines[-1].startswith("engine main: demo ready in ")
    assert ran.lines[-1].endswith("(async, CPU)")


def test_starting_the_same_engine_again_says_that_it_runs(run: Any, lab: fakes.Lab) -> None:
    run("%engine start demo")
    again = run("%engine start demo")
    assert again.lines == ["engine main: demo already running with this configuration (up 12 min 0 s)"]
    run("%engine start demo --restart")
    assert [options["restart"] for _, options in lab.started] == [False, False, True]


def test_a_model_named_by_a_variable_is_read(run: Any, shell: Any, lab: fakes.Lab) -> None:
    shell.user_ns["repo"] = "org/m"
    for line in ("$repo", "{repo}", "org/m", "'org/m'"):
        assert run(f"%engine start {line} --restart").error is None
    assert {model for model, _ in lab.started} == {"org/m"}


def test_a_start_that_fails_is_one_plain_line_below_the_progress(
    run: Any, shell: Any, lab: fakes.Lab
) -> None:
    lab.fails = "The weights are not there."
    ran = run("%engine start demo")
    assert isinstance(ran.error, EngineStartFailed)
    assert ran.lines[0].startswith("engine main: demo not started")
    assert ran.lines[1:] == ["EngineStartFailed: The weights are not there."] or len(ran.lines) == 2
    assert "engine" not in shell.user_ns


def test_a_bare_engine_line_shows_the_status_or_how_to_start(run: Any, lab: fakes.Lab) -> None:
    assert run("%engine").lines == [
        "No engine is running. Start one: %engine start MODEL option=value … [--restart] [--keep]"
    ]
    run("%engine start demo")
    assert run("%engine").out == run("%engine status").out == run("%engine status main").out
    assert "main: ready" in run("%engine").out


def test_a_kept_engine_is_started_let_go_of_and_listed_among_those_of_no_kernel(
    run: Any, shell: Any, lab: fakes.Lab
) -> None:
    for line in ("%engine start demo --keep idle_minutes=5", "%engine start demo keep=True idle_minutes=5"):
        run(line)
        assert lab.started[-1][1] == {
            "name": "main", "mode": "auto", "restart": False, "keep": True, "idle_minutes": 5
        }  # fmt: skip
    run("%engine start demo keep=False")
    assert "keep" not in lab.started[-1][1]
    assert run("%engine detach").lines == [
        "engine main: let go, and goes on. %engine attach main takes it again."
    ]
    assert lab.engines() == {}
    lab.keeps = [kept.Kept("mine", "a", "llama", 5, 0.0, "/s", "", 0.0, ready=True)]
    lab.keeps.append(kept.Kept("other", "b", "gemma", 6, 0.0, "/s", "", 0.0))
    for line in ("%engine", "%engine list"):
        listed = run(line).lines
        assert listed[-2].split() == ["mine", "llama", "kept", "%engine", "attach", "mine"]
        assert "starting" in listed[-1]
    run("%engine attach")
    assert lab.attached == (None, None, None)
    assert shell.user_ns["engine"] is lab.get_engine()
    run("%engine attach mine name=here")
    assert lab.attached == ("mine", "here", None)


def test_stop_restart_list_and_log(run: Any, shell: Any, lab: fakes.Lab) -> None:
    run("%engine start demo")
    first = lab.get_engine()
    run("%engine start other name=second")
    assert "second" in run("%engine list").out
    assert "current" in run("%engine list").lines[2]
    run("%engine restart main")
    assert shell.user_ns["engine"] is lab.get_engine("main") is not first
    assert run("%engine log main -n 2").lines[:2] == ["line 98", "line 99"]
    assert "/tmp/engine.log" in run("%engine log").out
    assert run("%engine stop second").out.startswith("Engine 'second' stopped in 0.5 s")
    assert list(lab.engines()) == ["main"]
    assert isinstance(run("%engine stop nowhere").error, EngineNotStarted)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%engine strat demo", "Did you mean 'start'? Write: %engine start MODEL"),
        ("%engine frobnicate", "Write: %engine start|attach|detach|status|stop|restart|sleep|wake|list|log"),
        ("%engine start demo keep=yes", "keep= is True or False."),
        ("%engine start demo idle_minutes=5", "idle_minutes= is of an engine that is kept: add --keep."),
        ("%engine attach a b", "Write: %engine attach [URL or NAME] [name=NAME]"),
        ("%engine detach a b", "Write: %engine detach [NAME]"),
        ("%engine start", "takes one model. Write: %engine start MODEL"),
        ("%engine start a b", "takes one model; got a, b"),
        ("%engine start demo --restrat", "Did you mean '--restart'?"),
        ("%engine start demo --max-model-len 5", "Options are written name=value, as in max_model_len=…"),
        ("%engine start demo a=1 a=2", "a= is given twice"),
        ('%engine start demo a="x', "never closed"),
        ("%engine start demo a=$nowhere", "NameError"),
        ("%engine attach http://a http://b", "Write: %engine attach [URL or NAME] [name=NAME]"),
        ("%engine attach http://a token=secret", "A token that stands in a cell is saved with the notebook"),
        ("%engine attach token='secret'", "give a variable, as token=$mine"),
        ("%engine log -n x", "-n takes a number"),
        ("%engine list more", "more is not understood here"),
        ("%edits onn a", "Did you mean 'on'? Write: %edits on NAME"),
        ("%edits default", "needs the names of edits. Write: %edits default NAME … (or all, or none)"),
        ("%edits on", "needs the names of edits. Write: %edits on NAME …"),
        ("%edits clear", "Write: %edits clear NAME … (or --all)"),
        ("%edits on a --all", "Unknown flag '--all'"),
    ],
)
def test_a_wrong_line_is_one_line_with_the_correct_form(
    run: Any, lab: fakes.Lab, line: str, said: str
) -> None:
    lab.start("demo")
    ran = run(line)
    assert isinstance(ran.error, CellUsageError)
    assert len(ran.lines) == 1
    assert said in ran.out


def test_an_engine_is_put_to_sleep_and_woken_by_a_line(run: Any, lab: fakes.Lab) -> None:
    engine = lab.start("demo")
    assert run("%engine sleep").lines == ["Engine main sleeps; the next request wakes it."]
    assert engine.slept is True
    assert run("%engine wake main").lines == ["Engine main is awake."]
    assert engine.slept is False
    assert "Write: %engine sleep [NAME]" in run("%engine sleep a b").out


def test_edits_are_listed_switched_and_cleared(run: Any, lab: fakes.Lab) -> None:
    engine = lab.start("demo")
    assert run("%edits").lines == [
        "Engine main has no edits. A cell that starts with %%edit NAME leaves one."
    ]
    for name in ("probe", "steer-2"):
        run(f"%%edit {name}\nx = 1\n")
    engine.edits["probe"].errors, engine.edits["probe"].last_error = 2, "ValueError: no\nmore"
    table = run("%edits").lines
    assert table[0].split() == ["edit", "version", "hits", "errors"]
    assert table[1].split() == ["probe", "1", "on", "0", "2:", "ValueError:", "no"]
    assert run("%edits off probe steer-2").lines == ["probe, steer-2: off"]
    assert [edit.on for edit in engine.edits] == [False, False]
    run("%edits on probe")
    assert engine.edits["probe"].on
    said = "Requests that name no edits run probe, later. Refused until it is installed"
    assert run("%edits default probe later").lines == [f"{said}: later."]
    assert engine.edits.default == ["probe", "later"]
    assert "default" in run("%edits").out
    assert "not a default" in run("%edits").out
    assert run("%edits default none").lines == ["Requests that name no edits run none."]
    assert run("%edits default all").lines == ["Requests that name no edits run all that are on."]
    assert engine.edits.default is None
    assert run("%edits clear probe").lines == ["probe: cleared"]
    assert run("%edits clear --all").lines == ["Cleared 1 edit of engine main."]
    assert list(engine.edits) == []


def test_an_unknown_edit_is_refused_before_any_is_switched(run: Any, lab: fakes.Lab) -> None:
    engine = lab.start("demo")
    run("%%edit probe\nx = 1\n")
    ran = run("%edits off probe prob")
    assert isinstance(ran.error, UnknownEdit)
    assert engine.edits["probe"].on
    assert "Did you mean 'probe'?" in ran.out
    assert len(ran.lines) == 1


def test_edits_of_another_engine_are_named_by_engine(run: Any, lab: fakes.Lab) -> None:
    first = lab.start("demo", name="first")
    run("%%edit probe\nx = 1\n")
    lab.start("demo", name="second")
    assert "second has no edits" in run("%edits").out
    assert "probe" in run("%edits engine=first").out
    run("%edits off probe engine=first")
    assert not first.edits["probe"].on

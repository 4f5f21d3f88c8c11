from __future__ import annotations

from typing import Any

import pytest

from nnsight_lab.errors import CellUsageError, EngineNotStarted, PlainError
from nnsight_lab.magics.extension import load_ipython_extension, unload_ipython_extension
from tests.magics import fakes


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest, lab: fakes.Lab) -> fakes.Engine:
    return lab.start("demo", mode=request.param)


@pytest.fixture
def sync_engine(lab: fakes.Lab) -> fakes.Engine:
    return lab.start("demo", mode="sync")


def test_a_trace_cell_runs_its_block_and_binds_what_it_saved(
    run: Any, shell: Any, engine: fakes.Engine
) -> None:
    ran = run("%%trace 'a prompt', max_tokens=2, temperature=0\nx = 20\ny = save([x + 1])\n")
    assert ran.error is None
    assert shell.user_ns["y"] == [21]
    assert "x" not in shell.user_ns
    assert shell.user_ns["tracer"].outputs[0].prompt == "a prompt"
    assert engine.calls == [(["a prompt"], {"max_tokens": 2, "temperature": 0})]


def test_the_block_is_entered_as_the_engines_mode_asks(run: Any, engine: fakes.Engine) -> None:
    run("%%trace 'a'\nx = 1\n")
    run("%%edit probe\nx = 1\n")
    assert fakes.Block.kinds == (["With"] * 2 if engine.mode == "sync" else ["AsyncWith"] * 2)


def test_autoawait_off_falls_back_to_a_plain_with(run: Any, lab: fakes.Lab) -> None:
    lab.start("demo", mode="async")
    run("%autoawait off")
    assert run("%%edit probe\nx = 1\n").error is None
    assert fakes.Block.kinds == ["With"]


def test_a_hint_of_the_engine_is_shown_once_below_the_cells_output(run: Any, engine: fakes.Engine) -> None:
    engine.hints = ["'xs' was not kept"]
    assert run("%%trace 'a', max_tokens=1\ny = save([1])\n").lines[-1] == "'xs' was not kept"
    engine.hints = []
    assert "xs" not in run("%%trace 'a', max_tokens=1\ny = save([1])\n").out


def test_a_cell_that_asks_for_an_estimate_shows_it_and_is_not_run(
    run: Any, shell: Any, engine: fakes.Engine
) -> None:
    shell.user_ns["prompts"] = ["a", "b"]
    ran = run("%%trace prompts, estimate=True, max_tokens=2\ny = save([1])\n")
    assert ran.error is None
    assert ran.out == "2 prompts: 1.00 MB\nhidden (1.00 MB)\n"
    assert "y" not in shell.user_ns
    assert engine.calls == []
    assert shell.user_ns["tracer"].estimate.startswith("2 prompts")
    assert run("%%trace prompts, estimate=True, show=False\ny = save([1])\n").out == ""
    run("%%trace prompts, max_tokens=2\ny = save([1])\n")
    assert engine.calls == [(["a", "b"], {"max_tokens": 2})]


def test_rerunning_an_edit_cell_replaces_the_edit(run: Any, shell: Any, engine: fakes.Engine) -> None:
    run("%%edit probe\nh = 1\n")
    run("%%edit probe\nh = 2\n")
    assert [(edit.name, edit.version, edit.source) for edit in engine.edits] == [("probe", 2, "h = 2")]
    assert shell.user_ns["edit"].name == "probe"


def test_a_header_reads_the_users_variables(run: Any, shell: Any, engine: fakes.Engine) -> None:
    shell.user_ns.update(prompts=["a", "b"], n=7)
    run("%%edit f'layer{n}'\nh = 1\n")
    run("%%trace prompts, max_tokens=n\nh = 1\n")
    assert engine.calls == [(["a", "b"], {"max_tokens": 7})]
    assert engine.edits["layer7"].version == 1


def test_a_header_names_another_engine(run: Any, lab: fakes.Lab) -> None:
    first = lab.start("demo", name="first")
    lab.start("demo", name="second")
    run("%%trace 'a', engine='first'\nh = 1\n")
    assert len(first.calls) == 1


def test_nested_invokes_run(run: Any, shell: Any, engine: fakes.Engine) -> None:
    assert run("%%trace\nwith tracer.invoke('a'):\n    y = save([1])\n").error is None
    assert shell.user_ns["tracer"].invoked == [("a",)]
    assert shell.user_ns["y"] == [1]


def test_shell_lines_and_line_magics_run_inside_the_body(run: Any, shell: Any, engine: fakes.Engine) -> None:
    seen: list[str] = []
    shell.register_magic_function(lambda line: seen.append(line), "line", "seen")
    ran = run(
        "%%trace 'a', show=False\nif True:\n    %seen it's\n    out = save(['x'])\n"
        "files = !echo one\n!echo two\n"
    )
    assert ran.error is None
    assert seen == ["it's"]
    assert ran.out.strip() == "two"
    assert shell.user_ns["out"] == ["x"]


def test_time_above_a_cell_prints_the_wall_time(run: Any, shell: Any, engine: fakes.Engine) -> None:
    ran = run("%%time\n%%trace 'a', show=False\ny = save([3])\n")
    assert shell.user_ns["y"] == [3]
    assert ran.out.startswith("Wall time: ")


def test_capture_above_a_cell_keeps_its_output(run: Any, shell: Any, engine: fakes.Engine) -> None:
    ran = run("%%capture out\n%%trace 'a', show=False\nprint('inside')\n")
    assert ran.out == ""
    assert shell.user_ns["out"].stdout == "inside\n"


@pytest.mark.parametrize("head", ["%%trace 'a'\n", '%%trace ["a",\n  "b"]\n', "%%time\n%%trace 'a'\n"])
def test_an_error_in_the_body_is_on_its_own_line(run: Any, engine: fakes.Engine, head: str) -> None:
    ran = run(f"{head}x = 1\n\ny = 1 / 0\n")
    assert isinstance(ran.error, ZeroDivisionError)
    assert (
        f"----> {head.count(chr(10)) + 3} y = 1 / 0" in ran.out
        or f"line {head.count(chr(10)) + 3}" in ran.out
    )


def test_an_error_in_the_cell_below_the_header_counts_from_the_first_line(
    run: Any, engine: fakes.Engine
) -> None:
    ran = run("%%trace 'a'\nx = 1\ndef f(:\n")
    assert isinstance(ran.error, SyntaxError)
    assert "line 3" in ran.out


@pytest.mark.parametrize(
    "cell",
    [
        "%%trace no such\nx\n",
        "%%edit\nx\n",
        "%%trace 'a'\n",
        "x = 1\n%%edit probe\n",
        "%%trace 'a'\ntry:\n  x\nfinally: y\n",
    ],
)
def test_a_wrong_first_line_is_one_line_and_no_traceback(run: Any, engine: fakes.Engine, cell: str) -> None:
    ran = run(cell)
    assert isinstance(ran.error, CellUsageError)
    assert len(ran.lines) == 1
    assert "CellUsageError" in ran.lines[0]


def test_a_trace_without_an_engine_is_one_line(run: Any) -> None:
    ran = run("%%trace 'a'\nx = 1\n")
    assert isinstance(ran.error, EngineNotStarted)
    assert len(ran.lines) == 1


def test_plain_errors_raised_in_any_cell_are_one_line(run: Any, shell: Any) -> None:
    shell.user_ns["PlainError"] = PlainError
    assert len(run("def f():\n    raise PlainError('what happened')\nf()\n").lines) == 1


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("%%trace 'a'", "incomplete"),
        ("%%trace ['a',", "incomplete"),
        ("%%trace 'a'\nx = 1", "incomplete"),
        ("%%trace 'a'\nx = 1\n\n", "complete"),
        ("%%trace 'a'\nif x:\n", "incomplete"),
        ("%%trace no such\nx = 1\n\n", "complete"),
        ("%%trace 'a'\nx = = 1\n\n", "invalid"),
        ("%%edit", "incomplete"),
        ("x = 1", "complete"),
        ("%%timeit\n%%trace 'a'\nx\n\n", "complete"),
        ("x = 1\n%%trace 'a'\n", "complete"),
    ],
)
def test_is_complete_answers_for_half_written_cells(
    shell: Any, engine: fakes.Engine, cell: str, status: str
) -> None:
    assert shell.check_complete(cell)[0] == status


def test_the_magics_are_listed_and_have_help(run: Any, shell: Any) -> None:
    listed = shell.magics_manager.lsmagic()
    assert {"trace", "edit"} <= set(listed["cell"])
    assert {"engine", "edits"} <= set(listed["line"])
    for name in ("%%trace", "%%edit"):
        assert "in plain Python: with lab." in shell.inspector.info(shell._ofind(name).obj)["docstring"]
    assert "Tensor" not in run("%who").out
    assert "__lab__" not in run("%who").out


def test_reset_does_not_lose_the_hidden_object(run: Any, shell: Any, engine: fakes.Engine) -> None:
    run("%reset -f")
    shell.user_ns["save"] = fakes.save
    assert run("%%trace 'a'\ny = save([1])\n").error is None


def test_loading_twice_and_unloading_twice_is_harmless(bare_shell: Any, lab: fakes.Lab) -> None:
    def state() -> tuple[Any, ...]:
        return (
            list(bare_shell.input_transformers_cleanup),
            list(bare_shell.Completer.custom_matchers),
            {kind: dict(known) for kind, known in bare_shell.magics_manager.magics.items()},
            {name: list(known) for name, known in bare_shell.events.callbacks.items()},
            sorted(set(bare_shell.user_ns) | set(bare_shell.user_ns_hidden)),
        )

    before = state()
    load_ipython_extension(bare_shell)
    once = state()
    load_ipython_extension(bare_shell)
    assert state() == once != before
    unload_ipython_extension(bare_shell)
    assert state() == before
    unload_ipython_extension(bare_shell)
    assert state() == before


def test_a_shared_cell_name_is_warned_of_and_the_caches_are_cleared(
    bare_shell: Any, lab: fakes.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from types import SimpleNamespace

    caches = SimpleNamespace(SOURCES={"a": "b"}, BLOCKS={("a", 1): None})
    monkeypatch.setitem(sys.modules, "nnsight.tracing.globals", caches)
    monkeypatch.setenv("IPYKERNEL_CELL_NAME", "cell")
    with pytest.warns(RuntimeWarning, match="IPYKERNEL_CELL_NAME"):
        load_ipython_extension(bare_shell)
    bare_shell.run_cell("x = 1")
    assert (caches.SOURCES, caches.BLOCKS) == ({}, {})
    unload_ipython_extension(bare_shell)

"""Cells that do what they say, in real kernels of three versions, on a real engine."""

from __future__ import annotations

import json

import pytest

from tests.notebook.kernels import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

newest = pytest.mark.parametrize("version", ["7.4"], indirect=True)

EIFFEL = "The Eiffel Tower is in the city of"


def test_a_kernel_is_of_the_version_asked_for(kernel: Kernel, version: str) -> None:
    assert kernel.value("__import__('ipykernel').__version__").startswith(f"{version}.")


def test_a_start_shows_where_it_is_and_ends_as_one_line(kernel: Kernel) -> None:
    started = kernel.started
    assert started is not None
    first, *later = started.of("display_data") + started.of("update_display_data")
    assert first["data"]["text/plain"].startswith("engine main: demo … ")
    assert len(later) >= 5
    (line,) = started.texts
    assert line.startswith("engine main: demo ready in ")
    assert line.endswith("(async, CPU)")


def test_a_start_does_not_flood_the_cell_with_logs(kernel: Kernel) -> None:
    started = kernel.started
    assert started is not None
    assert started.stdout == ""
    assert len(started.stderr.splitlines()) <= 2


def test_a_trace_binds_what_it_saved(kernel: Kernel) -> None:
    cell = f"""
%%trace "{EIFFEL}", max_tokens=4, temperature=0
hidden = model.model.layers[5].output[0].save()
"""
    ran = kernel.good(cell.lstrip())
    tokens, saved = ran.texts
    assert tokens == f"{EIFFEL} Paris, France."
    assert saved == "Saved: hidden bfloat16 [9, 576] 10.37 kB"
    # Nobody sits at this kernel, as at nbconvert's: a small table, and no widget to stay in the file.
    assert set(ran.shown[1]) == {"text/plain", "text/html"}
    assert ran.shown[1]["text/html"].count("<tr>") == 2
    assert kernel.value("tuple(hidden.shape)") == (9, 576)
    assert kernel.value("tracer.output.outputs[0].text") == " Paris, France."


def test_an_edit_runs_on_every_request_until_it_is_off(kernel: Kernel) -> None:
    kernel.good("%%edit probe\nhidden = model.model.layers[5].output[0].save()\n")
    one = "lab.generate('One, two,', max_tokens=1)[0].saves"
    assert kernel.value(f"tuple({one}['hidden'].shape)") == (4, 576)
    kernel.good("%edits off probe")
    assert kernel.value(f"list({one})") == []
    kernel.good("%edits on probe")
    assert kernel.value(f"list({one})") == ["hidden"]
    kernel.good("%edits clear probe")
    assert kernel.value(f"list({one})") == []
    assert "has no edits" in kernel.good("%edits").texts[0]


def test_completion_knows_the_tracer_the_options_and_the_modules(kernel: Kernel) -> None:
    assert "tracer.stop" in kernel.complete("%%trace 'a'\ntracer.st|")
    assert "max_tokens=" in kernel.complete("%%trace 'a', max_t|")
    assert "model.model.layers" in kernel.complete("%%trace 'a'\nmodel.model.lay|")
    assert "restart" in kernel.complete("%engine re|")


@newest
def test_loading_the_extension_twice_changes_nothing(kernel: Kernel) -> None:
    count = "len(get_ipython().input_transformers_cleanup)"
    before = kernel.value(count)
    kernel.good("%load_ext nnsight_lab")
    kernel.good("%reload_ext nnsight_lab")
    assert kernel.value(count) == before


@newest
def test_rerunning_the_start_cell_is_instant_and_says_so(kernel: Kernel) -> None:
    ran = kernel.good("%engine start demo max_model_len=1024")
    assert ran.elapsed_s < 1
    assert "already running with this configuration" in ran.texts[0]


@newest
def test_another_configuration_is_refused_by_what_differs(kernel: Kernel) -> None:
    ran = kernel.run("%engine start demo max_model_len=512")
    assert ran.error.startswith("EngineMismatch: ")
    assert "max_model_len: 1024 -> 512" in ran.error
    assert "\n" not in ran.error
    assert ran.shown == []
    assert kernel.value("engine.alive")


@newest
def test_a_header_may_go_on_and_text_over_lines_stays_as_it_is(kernel: Kernel) -> None:
    cell = f'''
%%time
%%trace ["{EIFFEL}",  # two prompts
         "One, two,"], max_tokens=2, \\
         temperature=0
# a comment

text = """two
  lines"""
length = [len(text)].save()

hidden = model.model.layers[3].output[0].save()
'''
    ran = kernel.good(cell.lstrip())
    assert ran.stdout.startswith("Wall time: ")
    assert kernel.value("length") == [[11], [11]]
    assert kernel.value("[tuple(each.shape) for each in hidden]") == [(9, 576), (4, 576)]


@newest
def test_invokes_are_requests_of_their_own(kernel: Kernel) -> None:
    cell = """
%%trace max_tokens=2, temperature=0
with tracer.invoke("One, two,"):
    first = model.model.layers[3].output[0].save()
with tracer.invoke("The capital of France is", max_tokens=1):
    second = model.model.layers[3].output[0].save()
"""
    kernel.good(cell.lstrip())
    assert kernel.value("[tuple(each.shape) for each in (first, second)]") == [(4, 576), (5, 576)]
    assert kernel.value("[len(output.outputs[0].token_ids) for output in tracer.outputs]") == [2, 1]


@newest
def test_prompts_from_a_variable_give_one_value_each(kernel: Kernel) -> None:
    kernel.good("prompts = ['One', 'One, two,', 'One, two, three,']")
    kernel.good("%%trace prompts, max_tokens=1\nhidden = model.model.layers[3].output[0].save()\n")
    lengths = kernel.value("[len(output.prompt_token_ids) for output in tracer.outputs]")
    assert kernel.value("[each.shape[0] for each in hidden]") == lengths
    assert len(set(lengths)) == 3


@newest
def test_rerunning_an_edit_cell_replaces_the_edit(kernel: Kernel) -> None:
    for layer in (5, 6):
        kernel.good(f"%%edit probe\nlayer = [{layer}].save()\n")
    assert kernel.value("lab.generate('One', max_tokens=1)[0].saves['layer']") == [6]
    (table,) = kernel.good("%edits").texts
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["probe", "2"]]


@newest
def test_a_value_that_all_requests_share_comes_back_from_each(kernel: Kernel) -> None:
    # One object of the block's code: what one request is done with is still another's.
    kernel.good("%%trace [f'Number {n}' for n in range(8)], max_tokens=1\nsame = 'the same'.save()\n")
    assert kernel.value("same") == ["the same"] * 8


@newest
def test_plain_python_does_the_same_as_a_cell(kernel: Kernel) -> None:
    kernel.good(f"""
with lab.trace("{EIFFEL}", max_tokens=1, temperature=0) as tracer:
    a = model.model.layers[5].output[0].save()
async with lab.trace("{EIFFEL}", max_tokens=1, temperature=0) as tracer:
    b = model.model.layers[5].output[0].save()
""")
    kernel.good(
        f"%%trace '{EIFFEL}', max_tokens=1, temperature=0\nc = model.model.layers[5].output[0].save()\n"
    )
    assert kernel.value("bool((a == b).all() and (a == c).all())")


@newest
def test_what_a_trace_leaves_in_the_notebook_is_small(kernel: Kernel) -> None:
    one = kernel.good("%%trace 'Once upon a time', max_tokens=300, ignore_eos=True\npass\n")
    many = kernel.good("%%trace [f'Number {n}' for n in range(100)], max_tokens=8, ignore_eos=True\npass\n")
    assert many.texts[0].startswith("100 of 100 requests, 800 tokens")
    for ran in (one, many):
        (shown,) = ran.shown
        assert len(json.dumps(shown)) < 8_000
        # Twenty updates a second at most, whatever the speed.
        assert len(ran.messages) < 10 + 22 * ran.elapsed_s


@newest
def test_status_and_list_are_small_tables(kernel: Kernel) -> None:
    (status,) = kernel.good("%engine status").texts
    assert status.startswith("engine     main: ready\nmodel      demo (bfloat16, cpu, async)")
    assert kernel.good("%engine list").texts[0].splitlines()[1].split() == [
        *("main", "demo", "async", "ready", "current")
    ]
    assert "The whole log: " in kernel.good("%engine log -n 3").texts[0]

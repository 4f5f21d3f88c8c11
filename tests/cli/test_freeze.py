from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.cli import main as cli
from nnsight_lab.cli.freeze import freeze
from nnsight_lab.cli.frozen import WIDGET, frozen
from nnsight_lab.errors import PlainError

VIEW = {"version_major": 2, "version_minor": 0, "model_id": "abc"}
STATE = {
    "application/vnd.jupyter.widget-state+json": {
        "state": {"abc": {}, "d": {}},
        "version_major": 2,
        "version_minor": 0,
    }
}


def display(**data: Any) -> dict[str, Any]:
    return {
        "output_type": "display_data",
        "metadata": {},
        "data": {name.replace("_", "/"): value for name, value in data.items()},
    }


def widget(**data: Any) -> dict[str, Any]:
    output = display(**data)
    output["data"] = {WIDGET: VIEW, **output["data"]}
    return output


def notebook(*outputs: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    cell = {
        "cell_type": "code",
        "execution_count": 1,
        "id": "one",
        "metadata": {"tags": ["é", "a/b"]},
        "outputs": list(outputs),
        "source": ["x = '</b>'\n", '{"data": 1}'],
    }
    text = {"cell_type": "markdown", "id": "two", "metadata": {}, "source": f"`{WIDGET}` stays in a text"}
    return {"cells": [cell, text], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def written(path: Path, content: dict[str, Any], **format_: Any) -> Path:
    path.write_text(json.dumps(content, **({"indent": 1} | format_)) + "\n", encoding="utf-8")
    return path


def test_a_widgets_output_keeps_its_table_and_nothing_else_changes(tmp_path: Path) -> None:
    outputs = [
        display(text_plain="1", image_png="aGk="),
        widget(text_html="<table></table>", text_plain="Panel()"),
        {"output_type": "stream", "name": "stdout", "text": "hi\n"},
    ]
    source = written(
        tmp_path / "a.ipynb", notebook(*outputs, widgets=STATE, kernelspec={"name": "p", "display_name": "P"})
    )
    before = source.read_text("utf-8")
    size, found = freeze(source, source)
    after = source.read_text("utf-8")
    assert (size, found.replaced, found.lost, found.states) == (len(before.encode()), 1, 0, 2)
    kept = iter(after.splitlines())
    line = next(kept)
    gone = []
    for original in before.splitlines():  # what is left are lines of the original, in their order
        if original == line or original.rstrip(",") == line.rstrip(","):
            line = next(kept, "")
        else:
            gone.append(original)
    assert line == ""
    assert any(WIDGET in original for original in gone)
    expected = json.loads(before)
    del expected["metadata"]["widgets"], expected["cells"][0]["outputs"][1]["data"][WIDGET]
    assert json.loads(after) == expected


def test_a_widget_with_nothing_to_show_says_so_and_is_counted(tmp_path: Path) -> None:
    source = written(
        tmp_path / "a.ipynb",
        notebook(widget(text_plain=["IntSlider(value=3)\n", "more"]), widget(), widget(text_html=[" \n"])),
    )
    _, found = freeze(source, tmp_path / "b.ipynb")
    assert (found.replaced, found.lost) == (0, 3)
    outputs = json.loads(found.text)["cells"][0]["outputs"]
    says = [output["data"]["text/plain"] for output in outputs]
    assert says[0] == "A widget was shown here, and left no table or picture to keep: IntSlider(value=3)"
    assert says[1] == says[2] == "A widget was shown here, and left no table or picture to keep."


def test_a_notebook_without_widgets_stays_byte_for_byte(tmp_path: Path) -> None:
    source = written(tmp_path / "a.ipynb", notebook(display(text_plain="é")), ensure_ascii=True, indent=3)
    target = tmp_path / "b.ipynb"
    freeze(source, target)
    assert target.read_bytes() == source.read_bytes()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80)
@given(
    datas=st.lists(
        st.dictionaries(
            st.sampled_from([WIDGET, "text/html", "image/png", "text/plain", "application/json"]),
            st.just('{"a": [1, "]"]} \\ é 日'),
        ),
        max_size=4,
    ),
    metadata=st.dictionaries(
        st.sampled_from(["widgets", "a", "b"]), st.dictionaries(st.text(), values, max_size=2)
    ),
    indent=st.sampled_from([None, 0, 1, 4, "\t"]),
    ascii_=st.booleans(),
    order=st.booleans(),
)
def test_any_layout_of_the_json_is_cut_in_the_right_places(
    datas: list[dict[str, str]], metadata: dict[str, Any], indent: Any, ascii_: bool, order: bool
) -> None:
    made = notebook(
        *({"output_type": "display_data", "metadata": {}, "data": data} for data in datas), **metadata
    )
    text = json.dumps(made, indent=indent, ensure_ascii=ascii_, sort_keys=order)
    found = frozen(text)
    expected = json.loads(text)
    expected["metadata"].pop("widgets", None)
    replaced = lost = 0
    for number, output in enumerate(expected["cells"][0]["outputs"]):
        if WIDGET in output["data"]:
            del output["data"][WIDGET]
            if {"text/html", "image/png"} & set(output["data"]):
                replaced += 1
            else:
                lost += 1
                said = json.loads(found.text)["cells"][0]["outputs"][number]
                output["data"] = said["data"]
                assert set(output["data"]) == {"text/plain"}
    assert json.loads(found.text) == expected
    assert (found.replaced, found.lost) == (replaced, lost)
    if not lost:  # only cut, nothing written: what is left is a subsequence
        rest = iter(text)
        assert all(character in rest for character in found.text)
    assert frozen(found.text).text == found.text


def test_what_was_frozen_shows_in_html_without_a_script_for_widgets(tmp_path: Path) -> None:
    nbconvert = pytest.importorskip("nbconvert")
    source = written(
        tmp_path / "a.ipynb",
        notebook(widget(text_html="<table id='fallback'></table>", text_plain="P()"), widgets=STATE),
    )
    freeze(source, source)
    book = nbformat.read(source, as_version=4)
    nbformat.validate(book)
    body, _ = nbconvert.HTMLExporter(template_name="basic").from_notebook_node(book)
    assert "<table id='fallback'>" in body or '<table id="fallback">' in body
    assert "widget-view" not in body.replace(f"<code>{WIDGET}</code>", "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "not a notebook"),
        (b'{"nbformat": 3, "worksheets": []}', "format 3"),
        (b'{"nbformat": 4, "cells": 1, "metadata": {}}', "no list of cells"),
        (
            b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "odd"}]}',
            "not a valid",
        ),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [' + b"[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_notebook_is_refused_in_one_line(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.ipynb"
    source.write_bytes(content)
    assert cli.main(["freeze", str(source), "--in-place"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert source.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.ipynb"]


def test_the_command_says_what_it_did_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "a.ipynb", notebook(widget(image_png="aGk="), widget(), widgets=STATE))
    before = source.read_bytes()
    assert cli.main(["freeze", str(source)]) == 0
    target = tmp_path / "a.frozen.ipynb"
    said = capsys.readouterr().out
    assert said.startswith(f"{target}: 1 widget output replaced, 1 had nothing to show and say so, ")
    assert "the state of 2 widget models dropped (" in said
    assert source.read_bytes() == before
    nbformat.validate(nbformat.read(target, as_version=4))


def test_writing_in_place_keeps_permissions_and_follows_links(tmp_path: Path) -> None:
    source = written(tmp_path / "a.ipynb", notebook(widget(image_png="aGk=")))
    source.chmod(0o640)
    link = tmp_path / "link.ipynb"
    link.symlink_to(source)
    freeze(link, link)
    assert link.is_symlink()
    assert stat.S_IMODE(source.stat().st_mode) == 0o640
    assert WIDGET not in json.loads(source.read_text("utf-8"))["cells"][0]["outputs"][0]["data"]


def test_what_cannot_be_read_or_written_is_said_in_one_line(tmp_path: Path) -> None:
    source = written(tmp_path / "a.ipynb", notebook())
    with pytest.raises(PlainError, match=r"nothing\.ipynb cannot be read: No such file"):
        freeze(tmp_path / "nothing.ipynb", source)
    with pytest.raises(PlainError, match="cannot be read: Is a directory"):
        freeze(tmp_path, source)
    with pytest.raises(PlainError, match="cannot be written: "):
        freeze(source, tmp_path / "no" / "b.ipynb")


def test_a_file_without_write_permission_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "a.ipynb", notebook(widget(image_png="aGk=")))
    before = source.read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anything
    with pytest.raises(PlainError, match="cannot be written: Permission denied"):
        freeze(source, source)
    assert source.read_bytes() == before


def test_a_write_that_fails_leaves_the_notebook_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "a.ipynb", notebook(widget(image_png="aGk=")))
    before = source.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlainError, match="No space left on device"):
        freeze(source, source)
    assert source.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ipynb"]


def test_the_notebook_itself_is_written_over_only_when_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "a.ipynb", notebook())
    assert cli.main(["freeze", str(source), "-o", str(tmp_path)]) == 1
    assert "--in-place" in capsys.readouterr().err

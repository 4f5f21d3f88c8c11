"""Transformed cells against nnsight's own capture, which finds a block again by file name and line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.magics import fakes

tracing = pytest.importorskip("nnsight.tracing.tracer")


class RealTracer(tracing.Tracer):  # type: ignore[misc, name-defined]
    """nnsight's tracer, to be entered in both ways, running its block in place."""

    def __aenter__(self) -> Any:
        self.capture()
        if tracing.skippable(self.node):
            tracing.skip_context(self)

        async def entered() -> RealTracer:
            return self

        return entered()

    async def __aexit__(self, *exception: Any) -> bool:
        return bool(self.__exit__(*exception))


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest, lab: fakes.Lab, shell: Any) -> fakes.Engine:
    engine = lab.start("demo", mode=request.param)
    engine.trace = lambda *_, **__: RealTracer()  # type: ignore[method-assign]
    shell.user_ns["save"] = tracing.save
    return engine


@pytest.mark.parametrize(
    "head",
    [
        "%%trace 'a'\n",
        "%%trace ['a (', # (\n 'b'], show=False\n",
        '%%trace """a\nb (""", \\\n  n=2\n',
        "%%time\n%%trace 'a'\n",
        "# why\n\n%%capture out\n%%time\n%%trace 'a'\n",
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        "y = save([1, 'a\\n  b\\nc'])\n",
        'y = save([1, """a\n  b\nc"""])\n',
        "# c\n\npass\ntry:\n\ty = save([1, 'a\\n  b\\nc'])\nfinally:\n\tpass\n",
        "for i in range(2):\n  y = [i, f'''a\n  b\n{'c'}''']\ny = save(y)\n",
        "def f():\n  return [1, 'a\\n'\n'  b\\nc']\ny = save(f())\n",
    ],
)
def test_nnsight_runs_the_body_as_it_was_written(
    run: Any, shell: Any, engine: fakes.Engine, head: str, body: str
) -> None:
    ran = run(head + body)
    assert ran.error is None
    assert shell.user_ns["y"] == [1, "a\n  b\nc"]


@pytest.mark.parametrize("head", ["%%trace 'a'\n", "%%trace ['a',\n 'b']\n", "%%time\n%%trace 'a'\n"])
def test_nnsight_reports_an_error_on_the_cells_line(run: Any, engine: fakes.Engine, head: str) -> None:
    ran = run(f"{head}x = '''\n'''\n\ny = 1 / 0\n")
    assert isinstance(ran.error, ZeroDivisionError)
    assert ran.error.__traceback__ is not None
    lines = []
    traceback: Any = ran.error.__traceback__
    while traceback is not None:
        lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    assert lines[-1] == head.count("\n") + 4


def test_the_same_cell_runs_again_in_the_other_mode(run: Any, shell: Any, lab: fakes.Lab) -> None:
    shell.user_ns["save"] = tracing.save
    for mode in ("sync", "async", "sync"):
        engine = lab.start("demo", mode=mode, restart=True)
        engine.trace = lambda *_, **__: RealTracer()  # type: ignore[method-assign]
        shell.user_ns["mode"] = mode
        assert run("%%trace ['a',\n 'b']\ny = save([mode])\n").error is None
        assert shell.user_ns["y"] == [mode]

"""A shared engine from a notebook: `%engine attach`, the cells, the panel's records, and letting go."""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.notebook.kernels import Kernel
from tests.server.conftest import TOKENS

pytestmark = pytest.mark.engine

TRACE = """%%trace "The Eiffel Tower is in the city of", max_tokens=4, temperature=0
hidden = model.model.layers[12].output[0].save()
"""
EDIT = "%%edit probe\nnorm = model.model.layers[3].output[0].norm().save()\n"
PANEL = """from nnsight_lab.panel.snapshot import Snapshots
from nnsight_lab.panel.surroundings import Surroundings"""


@pytest.fixture(scope="module")
def kernel(server, tmp_path_factory):
    found = Kernel(
        ".".join(metadata.version("ipykernel").split(".")[:2]),
        tmp_path_factory.mktemp("kernel"),
    )
    found.good("%load_ext nnsight_lab\nimport nnsight_lab as lab, os")
    found.good(f"os.environ['NNSIGHT_LAB_TOKEN'] = {TOKENS['bob']!r}")
    yield found
    found.close()


def test_cells_run_against_it_and_the_panel_knows_it(kernel, server):
    attached = kernel.good(f"%engine attach {server.url}")
    assert "attached to /" in attached.texts[-1]
    kernel.good(TRACE)
    assert kernel.value("tuple(hidden.shape)") == (9, 576)
    kernel.good(EDIT)
    assert kernel.value("lab.generate('One', max_tokens=1)[0].saves['norm'].dim()") == 0
    kernel.good(PANEL)
    engine = "Snapshots(Surroundings()).take([], saves=True).engines[0]"
    assert kernel.value(f"{engine}.state") == "ready"
    assert kernel.value(f"{engine}.edits[0].name") == "probe"
    assert kernel.value(f"{engine}.attach") == f"%engine attach {server.url}"
    assert kernel.value("len(engine.saves) >= 2")
    assert server.url in "\n".join(kernel.good("%engine status").texts)
    again = kernel.good(f"%engine attach {server.url}")
    assert again.error == ""


def test_what_is_wrong_is_one_line(kernel):
    assert "No address is given" in str(kernel.run("%engine attach").error)
    assert "takes one address" in str(kernel.run("%engine attach http://a http://b").error)
    error = str(kernel.run("%engine attach http://127.0.0.1:9 name=other").error)
    assert "does not answer" in error
    assert "Traceback" not in error


def test_letting_go_leaves_the_engine_and_takes_the_edits(kernel, server):
    kernel.good("%engine stop")
    assert server.figures()["edits"] == 0
    with server.http("bob") as http:
        body = {"model": "demo", "prompt": "One", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200

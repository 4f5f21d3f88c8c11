"""Every output that the package shows, as cells: what the tests of access and of fallbacks go through.

A new view is one `View` more in `VIEWS`. Its source makes the output from real values, without an engine,
since what is looked at is the drawing; the quickstart's test looks at outputs of a real engine.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Runs first, once.
SETUP = """\
import math, torch
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.table import as_html
import nnsight_lab as lab
from nnsight_lab import plots
from nnsight_lab.engine.status import EngineStatus
from types import SimpleNamespace
from nnsight_lab.magics.drawing import show, table, sentence, Drawing
from nnsight_lab.magics.live import drawn
from nnsight_lab.lens import Attention, LogitLens
from nnsight_lab.lens.shown import Several
from nnsight_lab.widgets import Heatmap, SavesBrowser
from nnsight_lab.widgets.cell_saves import CellSaves
from IPython.display import display, HTML
torch.manual_seed(7)
def progress(n, prompt, text, tokens, finished):
    home = dict(home_bytes=0, brought_bytes=0)
    return SimpleNamespace(index=n, prompt=prompt, text=text, tokens=tokens, finished=finished, **home)
WORDS = ['The', ' Eiffel', ' Tower', '\\n', ' is', '<b>', ' Straße', ' 北京']
wild = torch.randn(300, 500)
wild[3, 4], wild[5, 6], wild[7, 8] = math.nan, math.inf, -math.inf
store = SavesStore(max_requests=100)
for n in range(40):
    saved = {'hidden': torch.randn(12, 64) * (n + 1), 'loss': 0.5, 'note': '<i>text</i>\\nsecond line'}
    _ = store.put(f'lab-{n}', [{'trace': saved}], {'prompt': 'The Eiffel Tower is in the city of'},
                  module_paths={('trace', 'hidden'): f'model.layers.{n % 12}'})
def lens_of(layers, positions):
    sure = torch.linspace(0.05, 1, layers * positions).reshape(layers, positions, 1)
    ids = torch.randint(0, 8, (layers, positions, 5))
    tokens = tuple(WORDS[at % 8] for at in range(positions))
    return LogitLens(tuple(range(layers)), tuple(range(positions)), tuple(range(50, 50 + positions)), tokens,
                     ids, sure * torch.tensor([1.0, 0.2, 0.1, 0.05, 0.01]), torch.rand(layers, positions),
                     None, None, None, None, None, None, dict(enumerate(WORDS)))
def attention_of(layers, heads, tokens):
    scores = torch.randn(layers, heads, tokens, tokens) * 12
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    every = tuple(range(tokens))
    return Attention(scores.masked_fill(later, -math.inf).softmax(-1), tuple(range(layers)),
                     tuple(range(heads)), every, tuple(range(900, 900 + tokens)),
                     tuple(WORDS[at % 8] for at in every))
found = lens_of(6, 8)
"""


@dataclass(frozen=True)
class View:
    """One output.

    Attributes:
        name: What it is called.
        source: A cell that ends with it.
        selector: What shows that it is drawn.
        root: The widget's own element, whose controls the keyboard walks; empty for an output that is html.
        main: The control that its own keys work in: its picture, table or tokens.
        opens: Keys pressed there before it is looked at, so that what opens is too.
        opened: What shows that those keys did something.
        says: What must be readable where neither the widget nor a script runs.
    """

    name: str
    source: str
    selector: str
    root: str = ""
    main: str = "[role=application], [role=grid]"
    opens: tuple[str, ...] = ()
    opened: str = ""
    says: tuple[str, ...] = ()


_DRAWN = ".nnl-heatmap[data-state=done]"

VIEWS: tuple[View, ...] = (
    View(
        "heatmap",
        "Heatmap(wild, name='wild', axes=['token', 'hidden'])",
        _DRAWN,
        ".nnl-heatmap",
        opens=("Enter",),
        opened=".nnl-detail",
        says=("wild", "300 × 500", "1 NaN", "Colours"),
    ),
    View(
        "heatmap with sliders",
        "Heatmap(torch.rand(3, 2, 8, 9), name='four', rows=WORDS, axes=['layer', 'head', 'query', 'key'])",
        _DRAWN,
        ".nnl-heatmap",
        says=("four", "3 × 2 × 8 × 9"),
    ),
    View("line", "Heatmap(torch.randn(5000), name='line')", _DRAWN, ".nnl-heatmap", says=("line", "5,000")),
    View("number", "Heatmap(torch.tensor(2.5), name='one')", _DRAWN, ".nnl-heatmap", says=("one", "2.5")),
    View("empty", "Heatmap(torch.zeros(0, 3), name='none')", _DRAWN, ".nnl-heatmap", says=("none", "empty")),
    View(
        "saves browser",
        "SavesBrowser(store, name='store', height=240)",
        ".nnl-browser[data-state=done]",
        ".nnl-browser",
        opens=("Home", "p", "Enter"),
        opened=".nnl-pane .nnl-heatmap[data-state=done]",
        says=("hidden", "The Eiffel Tower", "[12, 64]"),
    ),
    View(
        "saved line",
        "CellSaves(store, ['lab-3', 'lab-4'], name='store')",
        ".nnl-saved",
        ".nnl-saved",
        main=".nnl-named",
        opens=("Enter",),
        opened=".nnl-pane .nnl-heatmap[data-state=done]",
        says=("hidden", "[12, 64]", "loss"),
    ),
    View("saves table", "store", "table", says=("hidden", "[12, 64]", "float32")),
    View(
        "token strip",
        "lab.token_strip(WORDS, torch.randn(8), token_ids=range(8), title='Scores of tokens')",
        ".nnl-strip[data-state=done]",
        ".nnl-strip",
        main="[data-place][tabindex='0']",
        opens=("ArrowRight", "Enter"),
        opened=".nnl-chosen",
        says=("Scores of tokens", "Eiffel", "score"),
    ),
    View(
        "token strip of rows",
        "lab.token_strip(WORDS, torch.rand(3, 8), rows=['layer 0', 'layer 1', 'layer 2'])",
        ".nnl-strip[data-state=done]",
        ".nnl-strip",
        main="[data-place][tabindex='0']",
        opens=("ArrowDown", "Enter"),
        opened=".nnl-chosen[data-row='1']",
        says=("layer 0", "Eiffel"),
    ),
    View(
        "plot of a heatmap",
        "plots.heatmap(torch.randn(12, 40), title='Activations', dims=('layer', 'position'))",
        ".js-plotly-plot .main-svg",
        says=("Activations", "layer", "float32 [12, 40]"),
    ),
    View(
        "plot of lines",
        "plots.lines(torch.rand(2, 30), rows=['one', 'two'], title='Lines')",
        ".js-plotly-plot .main-svg",
        says=("Lines", "one", "two"),
    ),
    View(
        "logit lens",
        "found",
        ".nnl-lens[data-state=done] .nnl-top",
        ".nnl-lens",
        opens=("Home", "Enter"),
        opened="[role=gridcell][aria-selected=true]",
        says=("Logit lens", "layer 5", "Eiffel"),
    ),
    View(
        "logit lens of several prompts",
        "Several([lens_of(40, 300), found])",
        ".nnl-lens[data-state=done] .nnl-top",
        ".nnl-lens",
        says=("Logit lens", "layer 39", "Eiffel"),
    ),
    View(
        "attention",
        "attention_of(6, 4, 24)",
        ".nnl-attention[data-state=done] .nnl-top",
        ".nnl-attention",
        main="[role=application]",
        opens=("Shift+ArrowDown", "Enter"),
        opened="[role=option][aria-selected=true]",
        says=("Attention", "layer", "head"),
    ),
    View("plot of a lens", "plots.logit_lens(found)", ".js-plotly-plot .main-svg", says=("Eiffel",)),
    View(
        "engine status",
        """\
status = EngineStatus('main', 'ready', 'demo', 'async', 'cpu', 'bfloat16', 65.0, 2, ('steer (on)',))
show(table(('', ''), status.rows()))""",
        "table",
        says=("main: ready", "steer (on)", "1 min 5 s"),
    ),
    View(
        "edits",
        "show(table(('edit', 'version', '', 'hits', 'errors'), [('steer', 2, 'on', 64, '0'), "
        "('probe', 1, 'off', 3, '2: IndexError: 5')]))",
        "table",
        says=("steer", "probe", "IndexError"),
    ),
    View(
        "running requests",
        """\
many = [progress(n, f'The number after {n} is', f' {n + 1}', 3, n < 5) for n in range(12)]
show(drawn(many, 2.0))""",
        "progress",
        says=("5 of 12 requests", "The number after 0 is 1"),
    ),
    View(
        "one request",
        "show(drawn([progress(0, 'The Eiffel Tower is in the city of', ' Paris', 1, True)], 0.5))",
        "div:has-text('Paris')",
        says=("The Eiffel Tower is in the city of Paris", "1 token"),
    ),
    View("a line", "show(sentence('engine main: demo ready in 17.1 s'))", "div", says=("ready in 17.1 s",)),
)

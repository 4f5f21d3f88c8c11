"""The report as text: one line a work, one column a peer, and in words what has no number."""

from __future__ import annotations

from typing import Any, Final

from nnsight_lab.bench.peers.environments import peers
from nnsight_lab.bench.peers.works import Work

#: What stands in a cell without a number: what its note begins with, and how.
_SHORT: Final = {
    "cannot": "cannot",
    "wrong values": "wrong",
    "not run": "not run",
    "not installed": "not installed",
    "failed": "failed",
}


def terminal(found: dict[str, Any]) -> str:
    """For a terminal."""
    head, body = _cells(found)
    widths = [max(len(row[place]) for row in [head, *body]) for place in range(len(head))]
    lines = [_aligned(row, widths) for row in [head, *body]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([_title(found), "", *lines, "", *(f"  {note}" for note in _notes(found))])


def markdown(found: dict[str, Any], command: str, picture: str = "") -> str:
    """For a page.

    Args:
        found: A report.
        command: What makes it again.
        picture: A figure beside the page; may be empty.
    """
    head, body = _cells(found)
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---", *["---:"] * (len(head) - 1)], *body]]
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    told = [
        "# Peers side by side",
        f"{found['date']}, {machine['gpu'] or machine['cpu']}, {machine['cores']} cores; {versions}; "
        f"model {found['model']}, {found['dtype']}.",
        _busy(found),
        f"```bash\n{command}\n```",
        _title(found) + " A work is described in `nnsight_lab/bench/peers/works.py`, how a peer does it in "
        "`nnsight_lab/bench/peers/runners`.",
        f"![The same as bars]({picture})" if picture else "",
        "\n".join(lines),
        "\n".join(f"- {note}" for note in _notes(found)),
    ]
    return "\n\n".join(part for part in told if part) + "\n"


def _title(found: dict[str, Any]) -> str:
    said = f"Time / that of {found['ratio_to']} with nothing asked (its seconds in brackets)."
    if found["drift"] is not None:
        said += f" Plain vLLM took {found['drift']:.2f} times as long at the end as at the beginning."
    return said


def _busy(found: dict[str, Any]) -> str:
    """What was wrong with the machine; empty where nothing is known to be."""
    machine = found["machine"]
    said = [found.get("note", "")]
    if (machine.get("load") or 0) > machine["cores"] / 2:
        said.append(f"Others used the machine: its load was {machine['load']} before this began.")
    return " ".join(filter(None, said))


def _cells(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    titles = {peer.name: peer.title for peer in peers().values()}
    names = list(dict.fromkeys(row["peer"] for row in found["rows"]))
    rows = {(row["peer"], row["work"]): row for row in found["rows"]}
    head = ["", *(titles.get(name, name) for name in names)]
    body = []
    for name, work in found["works"].items():
        title = Work(**work).title
        body.append([title, *(_cell(rows[peer, name], found, titles[peer]) for peer in names)])
    return head, body


def _cell(row: dict[str, Any], found: dict[str, Any], title: str) -> str:
    if row["seconds"] is None:
        return _SHORT.get(row["note"].partition(":")[0], "-")
    if row["ratio"] is None:
        return f"({row['seconds']:.3f} s)"
    own = f" ({row['seconds']:.3f} s)" if title == found["ratio_to"] else ""
    return f"{row['ratio']:.2f}{own}"


def _notes(found: dict[str, Any]) -> list[str]:
    """Each note once, with the works it is of."""
    titles = {peer.name: peer.title for peer in peers().values()}
    whose: dict[tuple[str, str], list[str]] = {}
    versions: dict[str, str] = {}
    for row in found["rows"]:
        versions[row["peer"]] = row["version"]
        for note in filter(None, row["note"].split("; ")):
            whose.setdefault((row["peer"], note), []).append(row["work"])
    notes = [
        f"{titles[peer]}: {note}" + ("" if len(works) == len(found["works"]) else f" ({', '.join(works)})")
        for (peer, note), works in whose.items()
    ]
    seen = [row["max_difference"] for row in found["rows"] if row["max_difference"] is not None]
    if seen:
        notes.append(
            f"Largest difference of any saved row from Hugging Face's, over its norm: {max(seen):.2g}."
        )
    own = [f"{titles[peer]} {version}" for peer, version in versions.items() if version]
    return [*notes, f"Peers: {', '.join(own)}."] if own else notes


def _aligned(row: list[str], widths: list[int]) -> str:
    first, *others = row
    return "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))])

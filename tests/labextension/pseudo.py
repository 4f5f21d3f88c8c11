"""A language pack in which every letter of this extension's words is another, so that an untranslated one is seen.

JupyterLab's server finds language packs by entry point, so this is one, on the server's path. A letter A to Z on
a page in this language is then either data or a word that did not go through the translator.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

SOURCES: Final = Path(__file__).resolve().parents[2] / "labextension" / "src" / "lab"
#: Esperanto: nobody's pack is in the way.
LOCALE: Final = "eo"
DOMAIN: Final = "nnsight_lab"
_WIDE: Final = {code: code + 0xFEE0 for code in [*range(65, 91), *range(97, 123)]}
_QUOTED: Final = r"'((?:[^'\\]|\\.)*)'"
#: Everything on a page that people read or hear, inside some elements.
READ: Final = """selectors => {
    const said = [];
    for (const root of document.querySelectorAll(selectors)) {
        for (const one of [root, ...root.querySelectorAll('*')]) {
            for (const name of ['aria-label', 'title', 'placeholder']) {
                said.push(one.getAttribute(name) ?? '');
            }
        }
        const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            said.push(walker.currentNode.data);
        }
    }
    return said.filter(text => /\\p{L}{2}/u.test(text));
}"""


def calls() -> list[str]:
    """Every place in the sources where the translator is asked: from its name to the end of the line."""
    return [
        found
        for path in sorted(SOURCES.rglob("*.ts"))
        for found in re.findall(r"\btrans\.(?:__|_n)\([^\n]*(?:\n[^\n]*)?", path.read_text(encoding="utf-8"))
    ]


def words() -> list[tuple[str, ...]]:
    """Each text that is translated, with its plural where it has one."""
    found = set()
    for path in SOURCES.rglob("*.ts"):
        text = path.read_text(encoding="utf-8")
        found.update((one,) for one in re.findall(rf"\btrans\.__\(\s*{_QUOTED}", text))
        found.update(re.findall(rf"\btrans\._n\(\s*{_QUOTED},\s*{_QUOTED}", text))
    return sorted(found)


def pseudo(text: str) -> str:
    """The text with letters that are twice as wide."""
    return text.translate(_WIDE)


def language_pack(folder: Path) -> Path:
    """Writes the pack; the folder belongs on the server's path."""
    package = folder / f"jupyterlab_language_pack_{LOCALE}"
    messages = package / "locale" / LOCALE / "LC_MESSAGES"
    messages.mkdir(parents=True)
    (package / "__init__.py").touch()
    plural_forms = "nplurals=2; plural=(n != 1);"
    head: dict[str, Any] = {"domain": DOMAIN, "language": LOCALE, "plural_forms": plural_forms, "version": "1"}
    texts = {forms[0]: [pseudo(form) for form in forms] for forms in words()}
    (messages / f"{DOMAIN}.json").write_text(json.dumps({"": head, **texts}), encoding="utf-8")
    known = folder / f"jupyterlab_language_pack_{LOCALE}-1.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jupyterlab-language-pack-{LOCALE}\nVersion: 1\n")
    entry = f"[jupyterlab.languagepack]\n{LOCALE} = {package.name}\n"
    (known / "entry_points.txt").write_text(entry)
    return folder

"""All errors that the package raises, with their remedies, for the runbook on the site.

mkdocs calls `on_page_markdown` (mkdocs.yml, hooks) and puts the list where docs/runbook.md asks for
it. `python tests/support/tools/error_list.py` prints it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[3] / "smckpt"
PLACE = "<!-- all errors -->"
OPEN = "…"  # what is known only when it is raised


@dataclass(frozen=True, order=True)
class Raised:
    """An error as the source has it: class, room, message, remedy."""

    kind: str
    room: str
    message: str
    remedy: str


def raised() -> list[Raised]:
    """The errors of the whole package, without those whose message is made elsewhere."""
    found = set()
    kinds = _kinds()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for kind, message, remedy in _calls(ast.parse(path.read_text()), kinds):
            if message.strip(OPEN + " :;"):
                found.add(Raised(kind, room, message, remedy))
    return sorted(found)


def _kinds() -> dict[str, str]:
    """The classes of errors, with the first line of what they say of themselves."""
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    return {
        node.name: (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _calls(tree: ast.Module, kinds: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        if node.func.id in kinds:
            remedy = next((word.value for word in node.keywords if word.arg == "remedy"), None)
            yield node.func.id, _text(node.args[0]), "" if remedy is None else _text(remedy)


def _text(node: ast.expr) -> str:
    """What an expression gives, as far as the source says it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} / {_text(node.orelse)}"
    return OPEN


def page() -> str:
    """The list as Markdown: a table for each class of errors."""
    by_kind: dict[str, list[Raised]] = defaultdict(list)
    for each in raised():
        by_kind[each.kind].append(each)
    lines = []
    for kind, says in _kinds().items():
        if by_kind[kind]:
            lines += [f"### {kind}", "", says, "", "| room | what it says | what to do |"]
            lines += ["|---|---|---|"]
            lines += [
                f"| {each.room} | {_cell(each.message)} | {_cell(each.remedy)} |"
                for each in by_kind[kind]
            ]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that is safe in a table of Markdown."""
    for mark in "\\|<>*_`[]":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else f"&{'lg'[mark == '>']}t;")
    return " ".join(text.split())


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it for each page."""
    return markdown.replace(PLACE, page()) if PLACE in markdown else markdown


if __name__ == "__main__":
    print(page())

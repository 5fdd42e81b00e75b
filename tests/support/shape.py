"""Counts of the package's shape: how many modules, lines, classes, and what it promises to avoid.

python tests/support/shape.py           the table that docs/design.md shows
python tests/support/shape.py --names   the class names that stand in two modules
python tests/support/shape.py --of DIR  modules, lines, lines of code and classes of any folder
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "smckpt"


# What came after the package was measured before: rooms, and modules of features that it lacked.
LATER = (
    "manager/", "integrations/", "run/",
    # other people's checkpoints as sources
    "translate/dcp/", "translate/boxes.py", "translate/foreign.py",
    "translate/deepspeed.py", "translate/folders.py", "translate/source_files.py",
    "translate/pickled.py", "translate/torch_archive.py", "cli/show_foreign.py",
    # alarms
    "engine/alarms.py", "staging/sums.py",
    # comparison of checkpoints, repair, the proofs of a resume
    "checkpoint/compare.py", "checkpoint/difference.py", "cli/compare.py", "cli/prove.py",
    "checkpoint/finish.py", "checkpoint/mend.py", "checkpoint/repair.py",
    "checkpoint/unfinished.py", "cli/repair.py", "checkpoint/reshard.py", "cli/reshard.py",
    "cli/chaos.py", "cli/trials.py",
    # conversions to and from DCP and torch.save, and loads of what they wrote
    "checkpoint/nested.py", "checkpoint/whole.py", "cli/convert.py", "layout/leaves.py",
    "translate/convert.py", "translate/foreign_catalogue.py", "translate/state_files.py",
    "translate/torch_values.py", "translate/torch_write.py", "translate/new_target.py",
    "translate/whole_state.py", "translate/stock_format.py",
    # whether a step loads on other degrees; the page of all checkpoints; Lustre; progress
    "checkpoint/per_rank.py", "checkpoint/restorable.py", "cli/browse", "cli/histogram.py",
    "cli/timeline.py", "storage/lustre.py", "engine/telling.py",
    # releases in eight and four bits; layers that predict further tokens; vision towers
    "translate/quantized.py", "translate/release.py", "translate/prediction.py",
    "translate/families/vision.py",
    # what servers get of a model that changes; pipeline stages
    "translate/publish", "translate/apply.py", "translate/pipeline.py",
)  # fmt: skip
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def modules(folder: Path = PACKAGE) -> Iterator[tuple[Path, str, ast.Module]]:
    """Every module of the package: its path below the package, its text, its tree."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(folder), text, ast.parse(text)


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Lines that hold code: no docstrings, no comments, no blank lines."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                code.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(code)


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def is_record(node: ast.ClassDef) -> bool:
    """Whether it only holds values, or is an error or the description of an interface."""
    given = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
    return (
        re.search(r"dataclass|NamedTuple|TypedDict|Enum|Protocol|ABC|Error|Warning", given)
        is not None
    )


def homonyms() -> dict[str, list[str]]:
    """Names of classes, and of type aliases in capitals, that more than one module defines."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, _, tree in modules():
        names = {node.name for node in classes(tree)}
        for name in sorted(names):
            found[name].append(str(path))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def verbs() -> tuple[int, int]:
    """Of the storage interface: members that a store must bring, and all of them."""
    tree = ast.parse((PACKAGE / "storage" / "base.py").read_text())
    storage = next(c for c in classes(tree) if c.name == "Storage")
    members = [n for n in storage.body if isinstance(n, (ast.FunctionDef, ast.AnnAssign))]
    public = [n for n in members if not (isinstance(n, ast.FunctionDef) and n.name.startswith("_"))]
    abstract = [
        n
        for n in public
        if isinstance(n, ast.FunctionDef)
        and any("abstract" in ast.unparse(d) for d in n.decorator_list)
    ]
    return len(abstract) or len(public), len(public)


def matches(pattern: str, inside: str = "", outside: str = " ") -> int:
    """Lines of the package that match, in modules below `inside` and not below `outside`."""
    expression = re.compile(pattern)
    return sum(
        len(expression.findall(line))
        for path, text, _ in modules()
        if str(path).startswith(inside) and not str(path).startswith(outside)
        for line in text.splitlines()
    )


def counts(found: list[tuple[Path, str, ast.Module]]) -> str:
    lines = sum(len(text.splitlines()) for _, text, _ in found)
    code = sum(lines_of_code(text, tree) for _, text, tree in found)
    return f"{len(found)}, {lines}, {code}, {sum(len(list(classes(tree))) for *_, tree in found)}"


def behave(found: list[tuple[Path, str, ast.Module]]) -> int:
    """How many classes do more than hold values."""
    return sum(not is_record(node) for *_, tree in found for node in classes(tree))


def table() -> list[tuple[str, str]]:
    found = list(modules())
    first = [each for each in found if not str(each[0]).startswith(LATER)]
    rooms: dict[str, list[int]] = defaultdict(list)
    for path, text, _ in found:
        room = path.parts[0] if len(path.parts) > 1 else "(top)"
        rooms[room].append(len(text.splitlines()))
    s3 = [each for each in found if str(each[0]).startswith("storage/s3/")]
    must, all_ = verbs()
    rows = [
        ("modules, lines, lines of code, classes", counts(found)),
        ("  without what came later (see LATER)", counts(first)),
        ("classes that are no records, errors or interfaces", str(behave(found))),
        ("  without what came later", str(behave(first))),
        ("class names that two modules define", str(len(homonyms()))),
        ("storage interface: required, all", f"{must}, {all_}"),
        ("S3: modules, lines, lines of code, classes", counts(s3)),
        ("ContextVar", str(matches(r"ContextVar\("))),
        (
            "isinstance(…Geometry) outside layout/geometry.py",
            str(matches(r"isinstance\([^)]*Geometry", outside="layout/geometry")),
        ),
        ("gc.get_objects", str(matches(r"gc\.get_objects\("))),
        ("modules over 500 lines", str(sum(len(t.splitlines()) > 500 for _, t, _ in found))),
    ]
    rows += [
        (f"  {room}: modules, lines", f"{len(sizes)}, {sum(sizes)}")
        for room, sizes in sorted(rooms.items())
    ]
    return rows


def main() -> None:
    if "--names" in sys.argv[1:]:
        for name, paths in sorted(homonyms().items()):
            print(name, *paths)
        return
    if sys.argv[1:2] == ["--of"]:
        print("modules, lines, lines of code, classes:", counts(list(modules(Path(sys.argv[2])))))
        return
    for label, value in table():
        print(f"{label:52} {value}")


if __name__ == "__main__":
    main()

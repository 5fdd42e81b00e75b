"""The package's shape: what a reader has to know, and how far a load walks through it.

python tests/support/tools/shape.py           the table that docs/design.md shows
python tests/support/tools/shape.py --names   the class names that stand in two modules
python tests/support/tools/shape.py --of DIR  the same of any folder
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests.support.limits import seconds  # noqa: E402

PACKAGE = ROOT / "smckpt"
# What a save, a load and a run's life are made of; all else is other systems, Hugging Face's names,
# doors and tools.
CORE = (
    "layout", "topology.py", "storage", "meeting", "checkpoint", "state_dict", "staging", "full",
    "engine", "manager", "errors.py", "registry.py", "calls.py", "_version.py",
)  # fmt: skip
# Of it: what verifies, repairs, copies and reshards stored checkpoints. No save, load or run needs
# it (a contract in pyproject.toml).
UPKEEP = ("checkpoint/upkeep/", "manager/doctor.py", "manager/follow.py")
SCHEME = ("scheme_of", "is_local", "is_s3_url")  # what a URL begins with
WORDS = ("its", "place", "told", "said", "way")  # that name a thing by no noun of the field
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Module = tuple[Path, str, ast.Module]


def modules(folder: Path = PACKAGE) -> Iterator[Module]:
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


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


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


def counts(found: list[Module]) -> str:
    """Modules that hold code; in brackets those that only make a folder a package."""
    lines = sum(len(text.splitlines()) for _, text, _ in found)
    code = [lines_of_code(text, tree) for _, text, tree in found]
    held, empty = len(code) - code.count(0), code.count(0)
    behind = sum(len(list(classes(tree))) for *_, tree in found)
    return f"{held} ({empty}), {lines}, {sum(code)}, {behind}"


def used_once(found: list[Module]) -> tuple[int, int]:
    """Private functions that their module names once beside the definition; and all functions."""
    once = every = 0
    for *_, tree in found:
        names = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, (ast.Name, ast.Attribute))
        )
        own = [node.name for node in functions(tree)]
        every += len(own)
        once += sum(n.startswith("_") and not n.startswith("__") and names[n] == 1 for n in own)
    return once, every


def largest_folder(found: list[Module]) -> str:
    sizes = Counter(str(path.parent) for path, *_ in found)
    return ", ".join(f"{folder} {size}" for folder, size in sizes.most_common(3))


def words(found: list[Module]) -> str:
    """How often a word stands in a name of the code (no comments, no text)."""
    parts: Counter[str] = Counter()
    for _, text, _ in found:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                parts.update(re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", token.string).lower()))
    return ", ".join(f"{word} {parts[word]}" for word in WORDS)


def scheme_checks(found: list[Module]) -> int:
    """How often a module above `storage` asks for the scheme of a URL."""
    return sum(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") in SCHEME
        for path, _, tree in found
        if path.parts[0] != "storage"
        for node in ast.walk(tree)
    )


def arguments(found: list[Module]) -> str:
    """How many arguments the calls have that users make."""
    wanted = {
        "translate/exports/export.py": "export_hf", "engine/api.py": "load",
        "manager/manager.py": "CheckpointManager",
    }  # fmt: skip
    out = []
    for path, _, tree in found:
        name = wanted.get(str(path), "")
        for node in tree.body:
            if name and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = {name, "async_save"} if name == "load" else {name}
                made = node if isinstance(node, ast.FunctionDef) else _made_by(node)
                if node.name in names and made is not None:
                    given = made.args
                    count = len(given.posonlyargs + given.args + given.kwonlyargs)
                    out.append(f"{node.name} {count - (made is not node)}")
    return ", ".join(out)


def _made_by(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((each for each in functions(node) if each.name == "__init__"), None)


# -- what runs --------------------------------------------------------------------------------


def imported(code: str) -> list[str]:
    """The modules of smckpt that a fresh interpreter has imported after the code."""
    code += (
        "\nimport sys, json; print(json.dumps([m for m in sys.modules if m.startswith('smckpt')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=seconds(300),
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def walk(act: Callable[[], object]) -> str:
    """Modules and functions of smckpt that run, in all threads, calls from one module into
    another, and the lines of those functions that hold code."""
    package, moves = str(PACKAGE) + os.sep, [0]
    ran: dict[tuple[str, str], set[int]] = {}

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
            if (code.co_filename, name) not in ran:
                ran[code.co_filename, name] = {line for *_, line in code.co_lines() if line}
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(package):
                caller = caller.f_back
            if caller is not None and caller.f_code.co_filename != code.co_filename:
                moves[0] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    lines = {(file, line) for (file, _), numbers in ran.items() for line in numbers}
    return f"{len({file for file, _ in ran})}, {len(ran)}, {moves[0]}, {len(lines)}"


def save_a_shard(folder: str) -> None:
    """One tensor, divided by two ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import smckpt

    mesh = init_device_mesh("cpu", (2,))
    smckpt.save({"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, checkpoint_id=folder)


def walks() -> list[tuple[str, str]]:
    """One tensor at another degree, and a restore whose newest step is damaged."""
    import torch

    import smckpt
    from tests.support.launch import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save_a_shard, 2, folder + "/one")
        state = {"w": torch.zeros(8)}
        smckpt.load({"w": torch.zeros(8)}, checkpoint_id=folder + "/one")  # what is imported once
        loaded = walk(lambda: smckpt.load(state, checkpoint_id=folder + "/one"))
        assert state["w"].tolist() == list(range(8))
        run = smckpt.CheckpointManager(folder + "/run", interval=1)
        for step in (1, 2):
            run.save(step, {"w": torch.full((8,), float(step))}).result()
        for data in Path(folder, "run").glob("*2/*.safetensors"):
            data.write_bytes(data.read_bytes()[:-8] + b"otherend")
        again = smckpt.CheckpointManager(folder + "/run", interval=1)
        restored = walk(lambda: again.restore(state))
        assert state["w"].tolist() == [1.0] * 8
    return [
        ("one tensor loaded at another degree", loaded),
        ("a restore past a bad step", restored),
    ]


# -- the table --------------------------------------------------------------------------------


def table() -> list[tuple[str, str]]:
    found = list(modules())
    core = [each for each in found if each[0].parts[0] in CORE]
    once, every = used_once(found)
    used = imported("import smckpt; smckpt.save; smckpt.load")
    translator = sum(name.startswith(("smckpt.translate", "smckpt.formats")) for name in used)
    empty = {
        ".".join(("smckpt", *path.with_suffix("").parts)).removesuffix(".__init__")
        for path, text, tree in found
        if not lines_of_code(text, tree)
    }
    rooms: dict[str, list[int]] = defaultdict(list)
    for path, text, tree in found:
        room = path.parts[0] if len(path.parts) > 1 else "(top)"
        rooms[room].append(lines_of_code(text, tree))
    behave = sum(not is_record(node) for *_, tree in found for node in classes(tree))
    return [
        (
            "package: modules that hold code (empty ones), lines, lines of code, classes",
            counts(found),
        ),
        ("core: the same", counts(core)),
        (
            "core without upkeep: the same",
            counts([each for each in core if not str(each[0]).startswith(UPKEEP)]),
        ),
        ("classes that are no records, errors or interfaces", str(behave)),
        ("class names that two modules define", str(len(homonyms()))),
        ("modules over 500 lines", str(sum(len(t.splitlines()) > 500 for _, t, _ in found))),
        (
            "`import smckpt; save; load` imports; of the translator",
            f"{len({*used} - empty)} ({len({*used} & empty)}); {translator}",
        ),
        *((f"{what}: modules, functions, moves, lines", counted) for what, counted in walks()),
        (
            "checks of a URL's scheme above `storage`: the core, all",
            f"{scheme_checks(core)}, {scheme_checks(found)}",
        ),
        ("private functions used once, of all functions", f"{once}, {100 * once / every:.0f}%"),
        ("largest folders", largest_folder(found)),
        ("arguments", arguments(found)),
        ("words in names", words(found)),
        *(
            (f"  {room}: modules, lines of code", f"{len(sizes)}, {sum(sizes)}")
            for room, sizes in sorted(rooms.items())
        ),
    ]


def main() -> None:
    if "--names" in sys.argv[1:]:
        for name, paths in sorted(homonyms().items()):
            print(name, *paths)
        return
    if sys.argv[1:2] == ["--of"]:
        print("modules, lines, lines of code, classes:", counts(list(modules(Path(sys.argv[2])))))
        return
    for label, value in table():
        print(f"{label:66} {value}")


if __name__ == "__main__":
    main()

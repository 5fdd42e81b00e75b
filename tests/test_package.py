"""The package as a user meets it: what importing costs, what it offers, what a wheel holds."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

import smckpt

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", "transformers", "accelerate", "boto3", "awscrt", "lightning", "rich")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def heavy_after(statement: str) -> str:
    return python(f"{statement}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])")


def test_importing_smckpt_imports_nothing_heavy():
    assert heavy_after("import smckpt") == "[]"


def test_asking_for_a_topology_imports_no_torch():
    assert heavy_after("from smckpt import ParallelState; ParallelState(8).ranker") == "[]"


@pytest.mark.parametrize("room", ["layout.image", "storage", "checkpoint", "engine.worker", "cli"])
def test_rooms_below_the_engine_import_no_torch(room):
    assert "torch" not in heavy_after(f"import smckpt.{room}")


def test_using_the_api_imports_neither_transformers_nor_boto3():
    loaded = heavy_after("from smckpt import *")
    for name in ("transformers", "accelerate", "boto3", "lightning"):
        assert name not in loaded


def test_every_public_name_resolves():
    for name in smckpt.__all__:
        assert getattr(smckpt, name) is not None
        assert name in dir(smckpt)


def test_type_checkers_are_told_the_same_names_as_the_interpreter():
    tree = ast.parse((ROOT / "smckpt" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: home for home, names in smckpt._HOMES.items() for name in names}
    assert told == homes
    assert set(homes) | {"__version__"} == set(smckpt.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="async_sav"):
        smckpt.async_sav  # noqa: B018


def test_every_error_is_public():
    errors = importlib.import_module("smckpt.errors")
    for name in errors.__all__:
        if name.endswith("Error"):
            assert name in smckpt.__all__


def test_the_wheel_holds_the_package_and_imports_in_an_empty_environment(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"  # a copy, so that the build leaves nothing in the repository
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "smckpt"):
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    subprocess.run([*build, "--wheel-dir", tmp_path, source], check=True, timeout=240)
    (wheel,) = tmp_path.glob("smckpt-*.whl")

    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    install = [bin_ / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, timeout=240)
    code = (
        "import smckpt, smckpt.layout.image, pathlib;"
        "assert (pathlib.Path(smckpt.__file__).parent / 'py.typed').is_file();"
        "print(smckpt.__version__, smckpt.ParallelState(8, hybrid_shard_degree=4).rep_size)"
    )
    done = subprocess.run(
        [bin_ / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [smckpt.__version__, "2"], done.stderr
    assert (bin_ / "smckpt").is_file()


def pins() -> dict[str, str]:
    """Requirement lines of requirements/dev.txt by normal name."""
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    return {normal(line.split("==")[0]): line for line in wanted}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_and_extra_is_pinned():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    text = config["options"]["install_requires"]
    text += "".join(config["options.extras_require"][name] for name in ("hf", "notebook"))
    text += config.get("options.extras_require", "test", raw=True)
    text += config.get("options.extras_require", "dev", raw=True)
    names = re.findall(r"^([A-Za-z0-9_-]+)>=", text, re.MULTILINE)
    assert {"torch", "numpy", "click", "transformers", "mypy"} <= set(names)
    assert [name for name in names if normal(name) not in pins()] == []
    assert all("==" in line for line in pins().values())


def test_torch_is_pinned_without_a_build():
    assert re.fullmatch(r"torch==[0-9.]+", pins()["torch"])


def test_the_readmes_example_runs_in_plain_python(tmp_path):
    text = (ROOT / "README.md").read_text()
    (code,) = [block for block in re.findall(r"\n\n((?:    .*\n|\n)+)", text) if "AdamW" in block]
    lines = textwrap.dedent(code).replace("/tmp", str(tmp_path)).strip().splitlines()
    assert len([line for line in lines if line]) <= 10
    assert "smckpt.save(" in code and "smckpt.load(" in code
    python("\n".join(lines))
    assert "ok" in python_cli("verify", str(tmp_path / "first-checkpoint"))


def python_cli(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.cli", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_says_what_its_commands_are():
    done = subprocess.run([ROOT / "dev"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    for command in ("./dev train", "./dev test"):
        assert command in done.stderr
        assert command in (ROOT / "README.md").read_text()

"""The package as a user meets it: what importing costs, what it offers, what a wheel holds."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools

import smckpt
from tests.support.limits import seconds
from tests.support.tools.shape import homonyms, modules

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", "transformers", "accelerate", "boto3", "awscrt", "lightning", "rich")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def heavy_after(statement: str) -> str:
    return python(f"{statement}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])")


def test_importing_smckpt_imports_nothing_heavy():
    assert heavy_after("import smckpt") == "[]"


def test_asking_for_a_topology_imports_no_torch():
    assert heavy_after("from smckpt import ParallelState; ParallelState(8).ranker") == "[]"


@pytest.mark.parametrize(
    "room", ["layout.image", "storage", "checkpoint", "engine.background.worker", "cli"]
)
def test_rooms_below_the_engine_import_no_torch(room):
    assert "torch" not in heavy_after(f"import smckpt.{room}")


def test_using_the_api_imports_neither_transformers_nor_boto3():
    loaded = heavy_after("from smckpt import *")
    for name in ("transformers", "accelerate", "boto3", "lightning"):
        assert name not in loaded


def test_a_save_and_a_load_import_no_module_of_the_translator_nor_of_an_integration(tmp_path):
    used = python(
        "import sys, torch, smckpt\n"
        f"smckpt.save({{'w': torch.ones(3)}}, checkpoint_id={os.fspath(tmp_path)!r})\n"
        f"assert smckpt.load(checkpoint_id={os.fspath(tmp_path)!r})['w'].sum() == 3\n"
        "above = tuple('smckpt.' + room for room in ('translate', 'formats', 'integrations'))\n"
        "print([m for m in sys.modules if m.startswith(above)])"
    )
    assert used.splitlines()[-1] == "[]"


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


def test_every_public_name_stands_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    errors = {name for name in smckpt.__all__ if name.endswith("Error")}  # by their module
    missing = {
        name
        for name in {*smckpt.__all__} - errors
        if not name.startswith("__") and not re.search(rf"smckpt\.{name}\b", page)
    }
    assert "::: smckpt.errors" in page and not missing


def test_every_error_is_public():
    errors = importlib.import_module("smckpt.errors")
    for name in errors.__all__:
        if name.endswith("Error"):
            assert name in smckpt.__all__


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone holds, in a folder of the package's name; builds leave nothing in ours."""
    clone = tmp_path_factory.mktemp("clone") / "smckpt"
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    return clone


def tracked() -> list[str]:
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, capture_output=True, text=True, check=True, timeout=seconds(60))
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def build(source: Path, kind: str, out: Path, **environment: str) -> Path:
    """The wheel or source distribution of a clone."""
    code = f"import setuptools.build_meta as b; print(b.build_{kind}({str(out)!r}))"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=seconds(240),
    )
    (built,) = out.glob("smckpt-*")
    return built


def test_the_wheel_holds_the_package_and_imports_in_an_empty_environment(source, tmp_path):
    wheel = build(source, "wheel", tmp_path)
    venv.create(tmp_path / "env", with_pip=True)
    bin_ = tmp_path / "env" / "bin"
    install = [bin_ / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, timeout=seconds(240))
    code = (
        "import smckpt, smckpt.layout.image, pathlib;"
        "at = pathlib.Path(smckpt.__file__).parent;"
        "assert (at / 'py.typed').is_file() and (at / 'cli' / 'page.html').is_file();"
        "print(smckpt.__version__, smckpt.ParallelState(8, hybrid_shard_degree=4).rep_size)"
    )
    done = subprocess.run(
        [bin_ / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True,
        timeout=seconds(60),
    )  # fmt: skip
    assert done.stdout.split() == [smckpt.__version__, "2"], done.stderr
    assert (bin_ / "smckpt").is_file()


def page_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        return files.read(name).decode()


RELATIVE = re.compile(r"\]\((?![a-z]+:|#)")


def test_no_link_of_the_index_page_is_broken(source, tmp_path):
    page = page_of(build(source, "wheel", tmp_path))
    assert "docs/guide.md" in (ROOT / "README.md").read_text()
    assert not RELATIVE.search(page)


def test_a_release_has_the_projects_urls_and_absolute_links(source, tmp_path):
    home = "https://code.invalid/smckpt"
    page = page_of(build(source, "wheel", tmp_path, SMCKPT_HOME_URL=home))
    assert f"Project-URL: Changelog, {home}/blob/HEAD/CHANGELOG.md" in page
    assert f"]({home}/raw/HEAD/docs/images/train.png)" in page
    assert f"]({home}/blob/HEAD/docs/guide.md)" in page
    assert not RELATIVE.search(page)


def test_the_source_distribution_has_what_the_repository_has(source, tmp_path):
    archive = build(source, "sdist", tmp_path)
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    assert [name for name in tracked() if name not in held] == []


def test_no_folder_shadows_an_editable_install(source, tmp_path):
    env = tmp_path / "env"
    venv.create(env)
    python_ = env / "bin" / "python"
    site = next((env / "lib").glob("python*/site-packages"))
    (site / "tools.pth").write_text(str(Path(setuptools.__file__).parent.parent))
    install = [sys.executable, "-m", "pip", "--python", python_, "install", "--quiet", "--no-deps"]
    install += ["--no-index", "--no-build-isolation", "--editable", source]
    subprocess.run(install, check=True, timeout=seconds(240))
    (site / "tools.pth").unlink()
    code = "import smckpt; print(smckpt.__file__)"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python_, "-c", code], cwd=source.parent, env=own, capture_output=True, text=True,
        timeout=seconds(60),
    )  # fmt: skip
    assert done.stdout.strip() == str(source / "smckpt" / "__init__.py"), done.stderr


def pins(name: str = "dev") -> dict[str, str]:
    """Requirement lines of a file of requirements by normal name."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    return {normal(line.split("==")[0]): line for line in wanted}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_each_class_name_has_one_meaning():
    # but for those of other systems, of which several have a class of that name
    theirs = {"AsyncCallsQueue", "DistributedFileSystemReader", "DistributedFileSystemWriter"}
    assert homonyms().keys() - theirs == {"SmckptTrainer"}  # the Trainer's, and Lightning's


def test_no_module_is_longer_than_500_lines():
    assert [str(path) for path, text, _ in modules() if len(text.splitlines()) > 500] == []


def test_no_public_function_takes_more_than_ten_arguments():
    """What few callers need is a field of a frozen value: of `SaveOptions`, `ExportOptions` …"""
    public = {name: getattr(smckpt, name) for name in smckpt.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    taken = {name: len(inspect.signature(value).parameters) for name, value in functions.items()}
    assert taken.keys() > {"async_save", "save", "load", "export_hf", "import_hf"}
    assert {name: count for name, count in taken.items() if count > 10} == {}


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


def test_the_demo_needs_few_packages_of_the_same_versions():
    few = pins("train")
    assert few.items() <= pins().items() and len(few) < 70
    needed = {"torch", "numpy", "boto3", "awscrt", "click", "rich", "msgspec"}  # of setup.cfg
    for path in (ROOT / "examples").glob("*.py"):
        if path.name != "ray_train.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    needed.add((node.module or "").split(".")[0])
                elif isinstance(node, ast.Import):
                    needed |= {each.name.split(".")[0] for each in node.names}
    own = {path.stem for path in (ROOT / "examples").iterdir()} | {"smckpt"}
    assert needed - sys.stdlib_module_names - own <= few.keys()


def test_torch_is_pinned_without_a_build():
    assert re.fullmatch(r"torch==[0-9.]+", pins()["torch"])


def test_the_script_says_what_its_commands_are():
    done = subprocess.run([ROOT / "dev"], capture_output=True, text=True, timeout=seconds(60))
    assert done.returncode != 0
    for command in ("./dev train", "./dev test"):
        assert command in done.stderr
        assert command in (ROOT / "README.md").read_text()


def test_no_room_imports_one_above_it_by_a_string() -> None:
    """The tool that holds the contract of imports reads statements alone."""
    layers = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [")[2].partition("]")[0]
    rooms = [re.findall(r"\w+", layer) for layer in re.findall('"(.*)"', layers)]
    floor = {room: number for number, layer in enumerate(rooms) for room in layer}
    assert floor["cli"] < floor["engine"] < floor["errors"]
    found = []
    for path in sorted((ROOT / "smckpt").rglob("*.py")):
        here = floor.get(path.relative_to(ROOT / "smckpt").parts[0].removesuffix(".py"), -1)
        named = re.findall(r"""import_module\(\s*f?["']smckpt\.(\w+)""", path.read_text())
        found += [f"{path.name}: {room}" for room in named if floor[room] < here]
    assert found == []

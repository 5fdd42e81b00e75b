"""Deletion, repair and export, killed at every call and at every message to the store.

The whole: `.venv/bin/python -m pytest -m long -s tests/kills`, which prints the counts. CI runs a
sample.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from smckpt import ExportOptions, export_hf, find_checkpoints, verify_checkpoint
from smckpt.checkpoint.commits.discover import found_at
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.checkpoint.upkeep.repair import repair_checkpoint
from smckpt.errors import UsageError
from smckpt.manager.retention import Newest, Retention
from smckpt.storage import open_storage
from tests.support import synthetic
from tests.support.faults.kills import SAMPLE_OR_ALL, copied, everything, fresh, killed_everywhere
from tests.support.saves import Group, State, hybrid, state_of
from tests.support.synthetic import Step, kept, on_mesh

WHERE = pytest.mark.parametrize("where", ["disk", "s3"])
RUN = "a" * 12
GROUPS = {"part0": (0, 2), "part1": (1, 3)}


def made() -> State:
    mesh = hybrid((0, 1, 2, 3), 2)
    rules = [on_mesh("w", (10, 6), mesh, "R S0"), kept("step")]
    return synthetic.state(rules, synthetic.whole({"w": (10, 6), "step": ()}))


@pytest.fixture
def root(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_root") if where == "s3" else str(tmp_path / "places")


# -- deleting ------------------------------------------------------------------------------------


def tidied(place: str) -> None:
    Retention(RunDirectory(open_storage(place), Template("{step}")), (Newest(1),), RUN).tidy("20")


@WHERE
@SAMPLE_OR_ALL
def test_a_deletion_killed_anywhere_loses_nothing_else_and_is_finished(
    root: str, tmp_path: Path, only: int | None
) -> None:
    source = tmp_path / "source"
    recorded: dict[str, Any] = {"metrics": {}, "manager": {"run": RUN}}
    for step in (10, 20):
        Step(source / str(step), GROUPS, made()).save(step=step, metadata=recorded)
    stay = {way: data for way, data in everything(str(source)).items() if way.startswith("20/")}

    def judge(place: str) -> str:
        assert stay.items() <= everything(place).items()
        found = find_checkpoints(place)
        for one in found:  # whole, or none
            assert verify_checkpoint(one).ok
        tidied(place)  # the next run
        assert everything(place) == stay  # an empty directory may stay
        return f"{len(found)} whole"

    found = killed_everywhere(lambda: copied(source, fresh(root)), tidied, judge, only)
    if only is None:
        assert {"1 whole", "2 whole"} <= found.keys()


# -- repairing -----------------------------------------------------------------------------------


def repaired(place: str) -> None:
    assert repair_checkpoint(place, threads=1).whole


@WHERE
@SAMPLE_OR_ALL
def test_a_commit_of_repair_killed_anywhere_makes_nothing_worse_and_a_second_one_finishes(
    root: str, tmp_path: Path, only: int | None
) -> None:
    source = tmp_path / "source"
    group = Group(source, (0, 1), session=RUN)
    group.save(step=10)
    group.write(1, step=20)
    before = everything(str(source))

    def judge(place: str) -> str:
        assert before.items() <= everything(place).items()
        found = found_at(open_storage(place))
        assert found is not None and verify_checkpoint(place).ok
        repaired(place)
        finished = found_at(open_storage(place))
        assert finished is not None and finished.step == 20 and verify_checkpoint(place).ok
        assert not [name for name in everything(place) if "fence" in name]
        return f"step {found.step}"

    found = killed_everywhere(lambda: copied(source, fresh(root)), repaired, judge, only)
    if only is None:
        assert {"step 10", "step 20"} <= found.keys()


@WHERE
@SAMPLE_OR_ALL
def test_a_mend_killed_anywhere_makes_nothing_worse_and_a_second_one_finishes(
    root: str, tmp_path: Path, only: int | None
) -> None:
    source, hurt = tmp_path / "source", tmp_path / "hurt"
    Group(source, (0, 1), session=RUN).save(step=10)
    shutil.copytree(source, hurt)
    (data,) = hurt.glob("data-*-r00001-0.safetensors")
    synthetic.flip(data, data.stat().st_size - 3)
    next(hurt.glob("part-*-r00000.json")).unlink()
    whole, before = everything(str(source)), everything(str(hurt))

    def mended(place: str) -> None:
        assert repair_checkpoint(place, sources=[source], threads=1).whole

    def judge(place: str) -> str:
        now = {way: data for way, data in everything(place).items() if not way.startswith(".")}
        assert before.keys() <= now.keys()
        for way, data in now.items():
            if not way.startswith("epoch-"):
                assert data in (before.get(way), whole[way]), way
        equal = sum(now.get(way) == data for way, data in whole.items() if "epoch" not in way)
        mended(place)
        assert verify_checkpoint(place).ok
        return f"{equal} of {len(whole) - 1} files whole"

    found = killed_everywhere(lambda: copied(hurt, fresh(root)), mended, judge, only)
    if only is None:
        assert len(found) >= 2


# -- exporting -----------------------------------------------------------------------------------


def weights(place: str) -> dict[str, bytes]:
    """The weights that `from_pretrained` would load, by file; {} if it finds none."""
    files = everything(place)
    if "model.safetensors.index.json" in files or "model.safetensors" in files:
        return {name: data for name, data in files.items() if name.startswith("model")}
    return {}


@pytest.mark.parametrize("limit", ["5GB", "400"], ids=["one file", "several files"])
@WHERE
@SAMPLE_OR_ALL
def test_an_export_killed_anywhere_never_looks_whole_and_a_second_one_finishes(
    root: str, tmp_path: Path, only: int | None, limit: str
) -> None:
    """It replaces an older model; whatever can be loaded is the one or the other."""
    models = []
    for seed in (1, 2):
        state = state_of(hybrid((0, 1), 1), rows=20, seed=seed)
        Group(tmp_path / f"c{seed}", (0, 1), state=state).save(step=seed)
        export(str(tmp_path / f"c{seed}"), str(tmp_path / f"hf{seed}"), limit)
        models.append(weights(str(tmp_path / f"hf{seed}")))
    old, new = models
    assert old.keys() == new.keys() and old != new and (len(new) > 2) == (limit == "400")

    def exported(place: str) -> None:
        export(str(tmp_path / "c2"), place, limit)

    def judge(place: str) -> str:
        there = weights(place)
        assert there in ({}, old, new)
        exported(place)
        assert everything(place) == everything(str(tmp_path / "hf2"))
        return "nothing loads" if not there else "the old one" if there == old else "the new one"

    found = killed_everywhere(
        lambda: copied(tmp_path / "hf1", fresh(root)), exported, judge, only, least=6
    )
    if only is None:
        # an object store shows a single file with the last message, and nothing comes after it
        assert {"nothing loads", "the old one"} <= found.keys()


@pytest.mark.parametrize("limit", ["5GB", "400"], ids=["one file", "several files"])
@pytest.mark.parametrize("where", ["disk"])
@SAMPLE_OR_ALL
def test_an_export_to_an_empty_directory_killed_anywhere_is_followed_by_one_that_completes(
    root: str, tmp_path: Path, only: int | None, limit: str
) -> None:
    Group(tmp_path / "c", (0, 1), state=state_of(hybrid((0, 1), 1), rows=20)).save(step=1)
    tokenizer = tmp_path / "tokenizer"
    for name in ("tokenizer.json", "additional_chat_templates/rag.jinja"):
        (tokenizer / name).parent.mkdir(parents=True, exist_ok=True)
        (tokenizer / name).write_text("{}")

    def exported(place: str) -> None:
        export(str(tmp_path / "c"), place, limit, overwrite=False, tokenizer=tokenizer)

    exported(str(tmp_path / "hf"))
    whole = everything(str(tmp_path / "hf"))
    assert "additional_chat_templates/rag.jinja" in whole

    def judge(place: str) -> str:
        left = {n: d for n, d in everything(place).items() if not n.startswith(".smckpt-export")}
        assert not weights(place) or left == whole
        try:
            exported(place)
        except UsageError:  # it was killed after it had shown all
            assert left == whole
            return "finished"
        finally:
            assert everything(place) == whole
        return "all files" if left == whole else "some files" if left else "no file"

    found = killed_everywhere(lambda: fresh(root), exported, judge, only)
    if only is None:
        assert {"no file", "some files", "finished"} <= found.keys()


def export(
    checkpoint: str, place: str, limit: str, *, overwrite: bool = True, tokenizer: Any = None
) -> None:
    options = ExportOptions(
        against_model=False, naming="module", max_shard_size=limit, threads=1, overwrite=overwrite,
        allow_nonfinite=True,
    )  # fmt: skip
    config = {"model_type": "llama"}
    export_hf(checkpoint, place, config=config, tokenizer=tokenizer, options=options)

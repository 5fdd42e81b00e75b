"""`smckpt diff`, as in a shell without torch, on checkpoints of several topologies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt.checkpoint.upkeep import compare
from smckpt.checkpoint.upkeep.compare import compare_checkpoints
from smckpt.checkpoint.upkeep.difference import Difference
from smckpt.cli.verify import rows_of
from smckpt.errors import CorruptCheckpointError
from tests.support.faults.forge import find, reforge
from tests.support.limits import seconds
from tests.support.main_job import ROOT
from tests.support.models import shards
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step

Tensors = dict[str, torch.Tensor]
NAMES = {"optimizer": {"ids": [["w"], ["b"]]}}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from smckpt.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "diff", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )


def differences(a: Path, b: Path) -> dict[tuple[str, str], Any]:
    """By name and holder."""
    found = compare_checkpoints(a, b).differences
    assert len({(one.name, one.holder) for one in found}) == len(found)
    return {(one.name, one.holder): one for one in found}


def weights() -> Tensors:
    torch.manual_seed(3)
    shapes = {"w": (13, 7), "b": (7,), "deep": (5, 3, 4), "none": (0, 4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def changed(name: str, at: tuple[int, ...], by: float) -> Tensors:
    state = weights()
    state[name][at] += by
    return state


def sharded(place: Path, state: Tensors, **more: Any) -> Path:
    return shards.write(place, 4, lambda rank: shards.fsdp2(state, rank, 4), **more)


OTHERS: dict[str, Callable[[Path, Tensors], Path]] = {
    "fsdp2": sharded,
    "fsdp1": lambda p, s: shards.write(p, 3, lambda rank: shards.fsdp1(s, rank, 3)),
    "tp": lambda p, s: shards.write(p, 2, lambda rank: shards.tp(s, rank, 2)),
    "full": lambda p, s: shards.write(p, 1, lambda rank: shards.plain(s, rank, 1), kind="FULL"),
    "own": lambda p, s: shards.write(p, 2, lambda rank: shards.own(s, rank)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_same_tensors_are_equal_whoever_held_them(other: str, tmp_path: Path) -> None:
    a, b = sharded(tmp_path / "a", weights()), OTHERS[other](tmp_path / "b", weights())
    for first, second in ((a, b), (b, a)):
        found = compare_checkpoints(first, second)
        assert found.equal, found
        assert found.tensors == 4


@pytest.mark.parametrize("other", OTHERS)
def test_one_element_is_found_across_topologies(other: str, tmp_path: Path) -> None:
    a = sharded(tmp_path / "a", weights())
    b = OTHERS[other](tmp_path / "b", changed("deep", (4, 1, 2), 0.25))
    for first, second in ((a, b), (b, a)):
        (one, *more) = differences(first, second).values()
        assert (one.name, one.what) == ("model.deep", "bits")
        assert (one.count, one.of, one.first) == (1, 60, (4, 1, 2))
        assert one.largest == pytest.approx(0.25, abs=1e-6)
        assert len(more) == (other == "own")  # each of two ranks has its own, both are compared


def test_the_command_needs_no_torch_and_prints_one_line_or_a_table(tmp_path: Path) -> None:
    a = sharded(tmp_path / "a", weights(), objects={"note": "hi"})
    b = sharded(tmp_path / "b", weights(), objects={"note": "hi"})
    c = sharded(tmp_path / "c", changed("w", (12, 0), 1.0), objects={"note": "ho"})
    done = command(a, b)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "equal: 4 tensors, 1 value, 632 B\n"
    done = command(a, c)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["name", "of", "what"]
    assert "1 of 91 elements differ, first [12, 0], by up to 1" in lines[2]
    assert lines[-2].split()[:3] == ["note", "ranks", "0,"] and '"hi" and "ho"' in lines[-2]
    assert lines[-1] == "differ: 2 names of 4 tensors, 1 value, 632 B"
    told = json.loads(command(a, c, "--json").stdout)
    assert told["equal"] is False
    assert told["differences"][-1]["first"] == [12, 0]


def test_names_dtypes_and_shapes(tmp_path: Path) -> None:
    a, b = weights(), weights()
    del b["b"]
    b["w"], b["deep"] = b["w"].double(), b["deep"].reshape(5, 12)
    b["new"] = torch.zeros(2, 2)
    found = differences(
        shards.write(tmp_path / "a", 2, lambda rank: shards.tp(a, rank, 2)),
        shards.write(tmp_path / "b", 2, lambda rank: shards.tp(b, rank, 2)),
    )
    told = {name: (one.what, one.detail) for (name, _), one in found.items()}
    assert told == {
        "model.b": ("only A", "only A has it: float32 [7]"),
        "model.new": ("only B", "only B has it: float32 [2, 2]"),
        "model.w": ("dtype", "float32 and float64"),
        "model.deep": ("shape", "[5, 3, 4] and [5, 12]"),
    }


def test_bits_count_and_not_numbers(tmp_path: Path) -> None:
    a = {"zero": torch.zeros(3), "nan": torch.tensor([1.0, float("nan"), 2.0]),
         "same": torch.tensor([float("nan")]), "half": torch.ones(4, dtype=torch.bfloat16),
         "long": torch.tensor([2**62, 5])}  # fmt: skip
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["zero"][1] = -0.0
    b["nan"][1] = 7.0
    b["half"][3] = 3.0
    b["long"][0] = -(2**62)
    found = differences(
        shards.write(tmp_path / "a", 1, lambda rank: shards.plain(a, rank, 1)),
        shards.write(tmp_path / "b", 1, lambda rank: shards.plain(b, rank, 1)),
    )
    told = {n: (one.count, one.largest, one.nonfinite) for (n, _), one in found.items()}
    assert told == {
        "model.zero": (1, 0.0, 0),
        "model.nan": (1, None, 1),
        "model.half": (1, 2.0, 0),
        "model.long": (1, float(2**63), 0),
    }


def test_long_tensors_are_compared_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_AT_ONCE", 64)
    other = weights()
    other["w"][5, 6] += 1
    other["w"][2, 3] -= 4
    a = sharded(tmp_path / "a", weights())
    b = shards.write(tmp_path / "b", 3, lambda rank: shards.fsdp1(other, rank, 3))
    (one,) = differences(a, b).values()
    assert (one.name, one.count, one.of, one.first) == ("model.w", 2, 91, (2, 3))
    assert one.largest == pytest.approx(4, abs=1e-5)


# -- values ---------------------------------------------------------------------------------------


def values(place: Path, **objects: Any) -> Path:
    state = {"w": torch.ones(2, 2)}
    return shards.write(
        place, 1, lambda rank: shards.plain(state, rank, 1), objects=objects, optimizers=NAMES
    )


def test_a_value_is_named_down_to_the_number(tmp_path: Path) -> None:
    import numpy as np

    def groups(lr: float) -> list[dict[str, Any]]:
        return [{"lr": lr, "betas": (0.9, 0.99), "params": [0]}]

    words = np.arange(6, dtype=np.uint32).reshape(2, 3)
    a = {"epoch": 1, "ledger": [1, 2, 3, 4], "words": words, "gone": None, "flag": True}
    b = {**a, "epoch": 1.0, "ledger": [1, 2, 4, 3], "words": words + (words > 4), "flag": 1}
    del b["gone"]
    found = differences(
        values(tmp_path / "a", **{"optimizer.param_groups": groups(0.1)}, **a),
        values(tmp_path / "b", **{"optimizer.param_groups": groups(0.2)}, **b),
    )
    told = {name: one.text for (name, _), one in found.items()}
    assert told == {
        "epoch": "1 and 1.0",
        "flag": "true and 1",
        "gone": "only A has it: null",
        "ledger": "2 of 4 elements differ, first [2]",
        "optimizer.param_groups.0.lr": "0.1 and 0.2",
        "words": "1 of 6 elements differ, first [1, 2]",
    }


def test_parameters_have_their_names_and_not_their_numbers(tmp_path: Path) -> None:
    def groups(*params: Any) -> dict[str, Any]:
        return {"optimizer.param_groups": [{"lr": 0.1, "params": list(params)}]}

    a = values(tmp_path / "a", **groups(0, 1))
    assert compare_checkpoints(a, values(tmp_path / "b", **groups("w", "b"))).equal
    assert not compare_checkpoints(a, values(tmp_path / "c", **groups("b", "w"))).equal


# -- ranks ----------------------------------------------------------------------------------------


def saved(place: Path, ranks: tuple[int, ...], **part: Any) -> Path:
    Group(place, ranks).save(step=10, **part)
    return place


def own_value(rank: int) -> dict[str, Any]:
    return {"seed": {"path": ["seed"], "value": 7 * rank}}


def test_what_each_rank_keeps_is_compared_rank_by_rank(tmp_path: Path) -> None:
    def of(rank: int) -> Any:
        entries, data = state_of(hybrid((0, 1), 1))(rank)
        return entries, {**data, "optimizer.step": bytes([9 * rank, *bytes(7)])}

    a = saved(tmp_path / "a", (0, 1))
    b = saved(
        tmp_path / "b", (0, 1), state=of,
        objects=lambda rank: {"rank": {"path": ["rank"], "value": 2 * rank}},
    )  # fmt: skip
    found = differences(a, b)
    assert set(found) == {("rank", "rank 1"), ("optimizer.step", "rank 1")}
    assert found["optimizer.step", "rank 1"].largest == 8


def test_a_rank_that_only_one_has_must_keep_nothing_of_its_own(tmp_path: Path) -> None:
    def same(rank: int) -> dict[str, Any]:
        return {"note": {"path": ["note"], "value": "as on all ranks"}}

    def alike(ranks: tuple[int, ...]) -> Any:
        def of(rank: int) -> Any:
            entries, data = state_of(hybrid(ranks, 1))(rank)
            return entries, {**data, "optimizer.step": bytes(8)}

        return of

    two = saved(tmp_path / "two", (0, 1), state=alike((0, 1)), objects=same)
    four = saved(tmp_path / "four", (0, 1, 2, 3), state=alike((0, 1, 2, 3)), objects=same)
    assert compare_checkpoints(two, four).equal
    seeds = saved(tmp_path / "seeds", (0, 1, 2, 3), objects=own_value)
    pair = saved(tmp_path / "pair", (0, 1), objects=own_value)
    found = differences(seeds, pair)
    assert set(found) == {
        (name, f"rank {rank}") for name in ("seed", "optimizer.step") for rank in (2, 3)
    }
    assert {one.what for one in found.values()} == {"ranks"}


def test_every_copy_that_a_group_has_saved_is_compared(tmp_path: Path) -> None:
    """Ranks 2 and 3 hold the shards of 0 and 1 again; one element of rank 3 has drifted."""
    made = state_of(hybrid((0, 1, 2, 3), 2))

    def drifted(rank: int) -> Any:
        entries, data = made(rank)
        key = "model.layers.1.weight"
        if rank == 3:
            data = {**data, key: data[key][:-4] + b"\1\1\1\1"}
        return entries, data

    groups = {"part0": (0, 1), "part1": (2, 3)}
    for name, state in (("a", made), ("b", drifted), ("c", made)):
        Step(tmp_path / name, groups, state).save()
    assert compare_checkpoints(tmp_path / "a", tmp_path / "c").equal
    for first, second in (("a", "b"), ("b", "a")):
        (one,) = differences(tmp_path / first, tmp_path / second).values()
        assert (one.name, one.count, one.first) == ("model.layers.1.weight", 1, (9, 5))
    saved(tmp_path / "whole", (0, 1), state=state_of(hybrid((0, 1), 1)))
    for first, second in (("b", "whole"), ("whole", "b")):
        found = differences(tmp_path / first, tmp_path / second)
        assert found["model.layers.1.weight", ""].count == 1


# -- what cannot be compared -----------------------------------------------------------------------


def test_a_step_of_two_runs(tmp_path: Path) -> None:
    for root, seed in (("a", 1), ("b", 1)):
        for step in (10, 20):
            Group(tmp_path / root / str(step), (0,), session=f"{step:012x}").save(
                step=step, state=state_of(hybrid((0,), 1), seed=seed + step * (root == "b"))
            )
    shutil.rmtree(tmp_path / "b" / "10")
    Group(tmp_path / "b" / "ten", (0,)).save(step=10, state=state_of(hybrid((0,), 1), seed=1))
    a, b = tmp_path / "a", tmp_path / "b"
    assert command(a, b, "--at", "10").returncode == 0
    assert command(a, b, "--at", "20").returncode == 1
    done = command(a, b, "--at", "30")
    assert done.returncode == 2 and "step 30 is not committed here; there is 10, 20" in done.stderr
    assert command(a, b).returncode == 2


def test_what_is_damaged_or_no_checkpoint_is_no_difference(tmp_path: Path) -> None:
    a, b = sharded(tmp_path / "a", weights()), sharded(tmp_path / "b", weights())
    shards.flip(shards.files(b)[0], -3 % shards.files(b)[0].stat().st_size)
    done = command(a, b)
    assert done.returncode == 2 and "differ from what was written" in done.stderr
    made = state_of(hybrid((0, 1, 2, 3), 2))
    Step(tmp_path / "step", {"part0": (0, 1), "part1": (2, 3)}, made).save()
    done = command(tmp_path / "step" / "part0", tmp_path / "step")
    assert done.returncode == 2 and "one group of a step" in done.stderr


@pytest.mark.parametrize(
    "objects", [{"a": {"value": 1}}, {"a": {"path": 7, "value": 1}}, {"a": ["path", "value"]}]
)
def test_forged_values_are_an_error_with_a_name(tmp_path: Path, objects: Any) -> None:
    sound = Group(tmp_path / "a", (0, 1), state=state_of(hybrid((0, 1), 1)))
    sound.save(step=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    crc = reforge(find(tmp_path / "b", "part")[0], lambda body: body.update(objects=objects))
    (manifest,) = find(tmp_path / "b", "manifest")
    reforge(manifest, lambda body: body["parts"][0].update(crc64=crc))
    with pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
        compare_checkpoints(tmp_path / "a", tmp_path / "b")


def test_ranks_that_differ_alike_share_a_row_after_what_the_job_shares() -> None:
    apart: dict[str, Any] = {"what": "bits", "count": 1, "of": 1}
    differences = (
        Difference("step", holder="rank 0", **apart),
        Difference("step", holder="rank 1", **apart),
        Difference("rng", holder="rank 0", **apart),
        Difference("weight", **apart),
    )
    assert [row[:2] for row in rows_of(differences)] == [
        ("weight", None), ("step", "ranks 0, 1"), ("rng", "rank 0"),
    ]  # fmt: skip

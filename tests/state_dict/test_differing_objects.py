"""Objects of which a rank keeps tensors where another one keeps none, such as an EMA of rank 0."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import smckpt
from smckpt import errors
from smckpt.checkpoint.upkeep.reshard import reshard_checkpoint
from smckpt.formats.conversion.convert import convert
from tests.state_dict.test_growing import Kept
from tests.support.launch import run_ranks

T = torch.full((2,), 7.0)
FORMS: dict[str, tuple[Any, Any]] = {  # of rank 0, of rank 1
    "tensor, none": ({"t": T}, {"t": None}),
    "none, tensor": ({"t": None}, {"t": T}),
    "tensor, empty": ({"t": T}, {}),
    "empty, tensor": ({}, {"t": T}),
    "tensor and number, number": ({"t": T, "n": 0}, {"n": 1}),
    "number, tensor and number": ({"n": 0}, {"t": T, "n": 1}),
    "deep": ({"a": {"t": T, "x": 1}, "b": 1}, {"a": {"t": None, "x": 2}, "b": 2}),
    "deep, beside a tensor": ({"a": {"t": T}, "u": T}, {"a": None, "u": T + 1}),
    "list, empty list": ({"l": [T, T]}, {"l": []}),
    "lists": ({"l": [T, 1]}, {"l": [None, T]}),
    "other keys": ({"t": T, "n": 0}, {"u": T + 1, "n": 1}),
    "bare, none": (T, None),
    "none, bare": (None, T),
    "bare list, empty list": ([T], []),
    "shapes": ({"t": T}, {"t": torch.zeros(0)}),
    "dtypes": ({"t": T}, {"t": T.to(torch.bfloat16)}),
    "dict, tensor": ({"t": {"x": T}}, {"t": T}),
    "array, none": ({"t": T.numpy()}, {"t": None}),
    "dict with a number, number": ({"t": {"n": 1, "x": T}, "u": T}, {"t": 5, "u": T}),
    "number, dict with a number": ({"t": 5, "u": T}, {"t": {"n": 1, "x": T}, "u": T}),
}

LOST = {"none, tensor", "empty, tensor", "number, tensor and number", "lists", "other keys",
        "none, bare", "dict, tensor", "number, dict with a number"}  # fmt: skip


def plain(value: Any) -> str:
    """A text that tells values apart, whatever the order of their keys."""
    if isinstance(value, dict):
        return str(sorted((key, plain(each)) for key, each in value.items()))
    return str([*map(plain, value)]) if isinstance(value, list) else repr(value)


def save_all(folder: str) -> None:
    for name, forms in FORMS.items():
        state = {"own": Kept(forms[dist.get_rank()]), "w": torch.ones(2)}
        with smckpt.CheckpointManager(f"{folder}/{name}", signals=(), timeout=60) as manager:
            manager.save(1, state).wait()


def job(folder: str, *hows: str) -> dict[str, dict[str, str]]:
    if dist.get_world_size() == 2:
        save_all(folder)
    return {how: load_all(folder, how) for how in hows}


def load_all(folder: str, how: str) -> dict[str, str]:
    """Form → what this rank has after a load, or the name of its error."""
    rank, found = dist.get_rank(), {}
    for name, forms in FORMS.items():
        step, kept = f"{folder}/{name}/1", copy.deepcopy(forms[rank % 2])
        own = Kept({"fresh": {}, "other": copy.deepcopy(forms[1 - rank % 2])}.get(how, kept))
        state: dict[str, Any] = {"own": own, "w": torch.zeros(2)}
        try:
            if how == "restore":
                root = f"{folder}/{name}"
                with smckpt.CheckpointManager(root, signals=(), timeout=60) as manager:
                    assert manager.restore(into=state) == 1
            elif how == "no target":
                own.value = (smckpt.load(checkpoint_id=step) or {})["own"]
            elif how == "no object":
                state["own"] = kept
                smckpt.load(state, checkpoint_id=step)
                own.value = state["own"]
            else:
                smckpt.load(state, checkpoint_id=step)
            found[name] = plain(own.value)
        except errors.CheckpointError as error:
            found[name] = type(error).__name__
        dist.barrier()
    return found


def test_each_rank_gets_its_own_object_back_be_it_tensors_or_none(tmp_path: Path) -> None:
    hows = ("equal", "fresh", "other", "restore", "no object", "no target")
    for rank, found in enumerate(run_ranks(job, 2, str(tmp_path), *hows, timeout=240)):
        # A load without a target has the tensors of all ranks, but where this rank has other things
        whole, keys = found.pop("no target"), FORMS["other keys"]
        assert whole.pop("dict, tensor") == "StateError"  # one name cannot be both
        assert whole.pop("other keys") == plain({**keys[1 - rank], **keys[rank]})
        for name in whole:
            assert whole[name] == plain(FORMS[name][rank]), (rank, name)
        for how, by_form in found.items():
            for name, forms in FORMS.items():
                assert by_form[name] == plain(forms[rank]), (how, rank, name)
    # On other numbers of ranks an object follows one saved rank.
    for rank, found in enumerate(run_ranks(job, 3, str(tmp_path), "fresh")):
        for name, forms in FORMS.items():
            assert found["fresh"][name] == plain(forms[rank % 2]), (rank, name)
    # One rank follows rank 0. A tensor of which it would have nothing is refused by name.
    (found,) = run_ranks(job, 1, str(tmp_path), "fresh")
    for name, forms in FORMS.items():
        wanted = "KeysMismatchError" if name in LOST else plain(forms[0])
        assert found["fresh"][name] == wanted, name


P = torch.nn.Parameter
KINDS: dict[str, tuple[Any, Any]] = {  # of rank 0, of rank 1: equal paths
    "expanded, not": ({"t": torch.full((1,), 7.0).expand(4)}, {"t": torch.arange(4.0)}),
    "expanded, not, of other sizes": ({"t": torch.ones(1, 2).expand(3, 2)}, {"t": torch.eye(4)}),
    "order": ({"a": 1, "t": T}, {"t": T, "a": 1}),
    "counter, dict": ({"c": Counter(a=T)}, {"c": {"a": T, "b": 2}}),
    "ordered, dict": ({"c": OrderedDict(a=T)}, {"c": {"a": T}}),
    "list, dict": ({"c": [1, T]}, {"c": {"k": T, "v": 2}}),
    "lists of other lengths": ({"l": [T, T + 1, T + 2, 0]}, {"l": [T, T + 1, 1]}),
    "array, tensor": ({"t": T.numpy()}, {"t": T + 1}),
    "array by columns, by rows": ({"t": np.arange(6.0).reshape(3, 2).T}, {"t": np.ones((2, 3))}),
    "parameter, tensor": ({"t": P(T)}, {"t": T + 1}),
    "parameters, list": ({"l": torch.nn.ParameterList([P(T)])}, {"l": [T + 1]}),
    "keys": ({"c": {(0, 1): T}}, {"c": {"(0, 1)": T + 1}}),
}


def described(value: Any) -> str:
    """A text that tells values apart, their classes and the order of their keys too."""
    kind = type(value).__name__
    if isinstance(value, torch.nn.ParameterList):
        value = [*value]
    if isinstance(value, dict):
        value = [(key, described(each)) for key, each in value.items()]
    elif isinstance(value, list):
        value = [*map(described, value)]
    elif isinstance(value, torch.Tensor):
        value = value.tolist(), value.stride(), value.requires_grad
    elif isinstance(value, np.ndarray):
        value = value.tolist(), value.flags["F_CONTIGUOUS"]
    return f"{kind} {value!r}"


def of_two_kinds(folder: str) -> dict[str, dict[str, str]]:
    rank, found = dist.get_rank(), {}
    for name, forms in KINDS.items():
        step = f"{folder}/{name}"
        smckpt.save({"own": Kept(forms[rank]), "w": torch.ones(2)}, checkpoint_id=step)
        fresh, equal = Kept({}), Kept(copy.deepcopy(forms[rank]))
        for own in (fresh, equal):
            smckpt.load({"own": own, "w": torch.zeros(2)}, checkpoint_id=step)
        whole = Kept(None)
        whole.value = (smckpt.load(checkpoint_id=step) or {})["own"]
        found[name] = {
            how: described(own.value)
            for how, own in (("fresh", fresh), ("equal", equal), ("whole", whole))
        }
    return found


def test_a_kind_that_one_rank_has_is_not_that_of_another_rank(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(of_two_kinds, 2, str(tmp_path), timeout=240)):
        for name, forms in KINDS.items():
            for how, got in found[name].items():
                if (how, name) != ("whole", "parameters, list"):  # no object is made
                    assert got == described(forms[rank]), (rank, how, name)


def one_value_on_each(folder: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))

    def divided(value: int) -> DTensor:
        local = torch.full((1,), float(value)).expand(4)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    smckpt.save({"x": divided(dist.get_rank() + 1)}, checkpoint_id=folder)
    state = {"x": divided(0)}
    smckpt.load(state, checkpoint_id=folder)
    return [(smckpt.load(checkpoint_id=folder) or {})["x"].tolist(), state["x"].to_local().tolist()]


def test_a_tensor_whose_shards_have_one_value_each_is_not_of_one_value(tmp_path: Path) -> None:
    whole = [1.0] * 4 + [2.0] * 4
    found = run_ranks(one_value_on_each, 2, str(tmp_path))
    assert found == [[whole, whole[:4]], [whole, whole[4:]]]


def of_rank(rank: int) -> dict[str, Any]:
    """What ranks have alone, in other lengths, in stages of a model, and in other forms."""
    state: dict[str, Any] = {
        "w": torch.ones(2),
        "items": ({"a": T, "n": 3}, {"a": T + 1, "n": 4})[: 1 + rank % 2],
        "net": OrderedDict({f"{rank}.weight": T + rank, f"{rank}._extra_state": {"amax": rank}}),
        "turned": OrderedDict((k, T[: 1 + (rank == 0)]) for k in ("ab" if rank == 0 else "ba")),
        "form": [[5, T], {"k": 5, "l": T}, {"k": [T], "l": 7}][rank],
    }
    if rank:
        late = {"t": torch.full((rank + 1,), float(rank)), "n": rank}
        state["late"] = {**late, "l": [T] if rank == 1 else (T, 2)}
        state["other"] = {"x": {"t": T, "n": 1}} if rank == 1 else {"x": {"u": T, "n": 2}}
    if rank == 1:
        state["ordered"] = OrderedDict(k=[T, 14], m=[91])
    if rank == 2:
        state["values"] = {"v": 5, "deep": [1, {"k": 2}]}
    return state


def of_load(rank: int) -> dict[str, Any]:
    """The state of a rank, and whole parts of others."""
    each = [of_rank(rank) for rank in range(3)]
    net = each[rank]["net"] | each[0]["net"] | each[1]["net"] | each[2]["net"]
    other = {"x": each[1]["other"]["x"] | (each[2]["other"]["x"] if rank else {})}
    other["x"] |= each[rank].get("other", other)["x"]
    return {**each[2], **each[1], **each[rank], "net": net, "other": other}


def apart(folder: str, saves: bool) -> tuple[dict[str, Any], ...]:
    rank = dist.get_rank()
    if saves:
        smckpt.save(of_rank(rank), checkpoint_id=folder)
    whole = smckpt.load(checkpoint_id=folder) or {}
    wanted = of_load(rank)
    target = cleared(wanted)
    smckpt.load(target, checkpoint_id=folder)
    mixed = {**target, "other": {"x": {"t": torch.zeros(2), "u": torch.zeros(2), "n": 0}}}
    try:
        smckpt.load(mixed, checkpoint_id=folder)
    except errors.KeysMismatchError as error:
        assert "lacks ['other.x.u']" in str(error), error
        return whole, target
    raise AssertionError("an object was mixed of two")


def cleared(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, cleared(each)) for key, each in value.items())
    return type(value)(map(cleared, value)) if isinstance(value, (list, tuple)) else -1


def listed(state: dict[str, Any]) -> dict[str, str]:
    """By key; without the order of ranks in what their states were joined to."""
    joined = {"net", "other"}
    return {k: (plain if k in joined else described)(v) for k, v in state.items()}


def test_what_a_rank_lacks_is_whole_and_of_one_rank_in_loads_reshards_and_conversions(
    tmp_path: Path,
) -> None:
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    first = run_ranks(apart, 3, saved, True)
    reshard_checkpoint(saved, again, shard=3)
    resharded = run_ranks(apart, 3, again, False)
    for rank in range(3):
        wanted = listed(of_load(rank))
        for whole, target in (first[rank], resharded[rank]):
            assert listed(whole) == wanted, rank
            assert listed(target) == wanted, rank
        convert(saved, tmp_path / f"{rank}.pt", to="torch", rank=rank)
        assert listed(torch.load(tmp_path / f"{rank}.pt")) == wanted, rank
    with pytest.raises(errors.StateError, match=r"(?s)items.*late\.n.*different on different"):
        convert(saved, tmp_path / "one.pt", to="torch")
    with pytest.raises(errors.UsageError, match="alone"):
        reshard_checkpoint(saved, tmp_path / "one", shard=1)


def of_one_rank(folder: str) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {"own": Kept({"t": T})}
    if ranks > 1:
        late = {"late": Kept({"v": rank, "t": torch.ones(1 + rank)})} if rank else {}
        smckpt.save({**state, **late}, checkpoint_id=folder)
    found = []
    for fresh in ({}, {"v": 0, "t": torch.zeros(2)}):
        state = {"own": Kept({}), "late": Kept(fresh)}
        smckpt.load(state, checkpoint_id=folder)
        found.append(state["late"].value)
    found.append((smckpt.load(checkpoint_id=folder) or {})["late"])
    return [*map(plain, found)]


def test_an_object_that_other_ranks_saved_is_of_one_of_them(tmp_path: Path) -> None:
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    first, second = ([plain({"v": rank, "t": torch.ones(1 + rank)})] * 3 for rank in (1, 2))
    assert run_ranks(of_one_rank, 3, saved) == [first, first, second]
    reshard_checkpoint(saved, again, shard=1)  # it has the object that a load of one rank takes
    assert run_ranks(of_one_rank, 1, saved) == run_ranks(of_one_rank, 1, again) == [first]


def under_local(folder: str) -> list[str]:
    rank = dist.get_rank()
    model = fully_shard(torch.nn.Linear(4, 4))
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        late = {"t": T + rank, "n": rank}
        state = {"model": model.state_dict(), **({"late": late} if rank in (1, 2) else {})}
        smckpt.save(state, checkpoint_id=folder)
        target = {"model": model.state_dict(), "late": {"t": T.clone(), "n": 0}}
        smckpt.load(target, checkpoint_id=folder)
    return [plain(one["late"]) for one in (target, smckpt.load(checkpoint_id=folder) or {})]


def test_under_local_too_an_object_is_of_one_rank(tmp_path: Path) -> None:
    whose = [1, 1, 2, 2]
    wanted = [[plain({"t": T + rank, "n": rank})] * 2 for rank in whose]
    assert run_ranks(under_local, 4, str(tmp_path)) == wanted


def values_of_late_ranks(folder: str) -> list[Any]:
    rank, found = dist.get_rank(), []
    forms: list[tuple[Any, Any]] = [  # what is saved, and what is loaded into
        (Kept({"v": rank, "more": {"name": "a"}}), Kept({})),
        ({"v": rank, "name": "a"}, {"v": 0, "name": ""}),
        (rank, 0),
    ]
    for number, (late, empty) in enumerate(forms):
        state: dict[str, Any] = {"w": torch.ones(2), **({"late": late} if rank else {})}
        state |= {"extra": {"t": T}} if rank == 2 else {}  # whose tensors every rank takes
        smckpt.save(state, checkpoint_id=f"{folder}/{number}")
        state = {"w": torch.zeros(2), "late": empty, "extra": {"t": torch.zeros(2)}}
        smckpt.load(state, checkpoint_id=f"{folder}/{number}")
        found.append(plain(getattr(state["late"], "value", state["late"])))
    return found


def test_values_that_other_ranks_saved_are_of_the_lowest_of_them(tmp_path: Path) -> None:
    def expected(rank: int) -> list[str]:
        return [
            plain({"v": rank, "more": {"name": "a"}}),
            plain({"v": rank, "name": "a"}),
            f"{rank}",
        ]

    found = run_ranks(values_of_late_ranks, 3, str(tmp_path))
    assert found == [expected(1), expected(1), expected(2)]
    for number, late in enumerate(expected(1)):
        saved, resharded, file = (tmp_path / f"{number}{end}" for end in ("", ".one", ".pt"))
        reshard_checkpoint(saved, resharded, shard=1)
        with pytest.raises(errors.StateError, match=r"late.* different on different ranks"):
            convert(saved, file, to="torch")
        convert(saved, file, to="torch", rank=0)
        only = smckpt.load(checkpoint_id=saved, options=smckpt.LoadOptions(only=["late"]))
        for state in (only, *(smckpt.load(checkpoint_id=at) for at in (saved, resharded))):
            assert plain((state or {})["late"]) == late
        assert plain(torch.load(file)["late"]) == late


def each_its_part(folder: str) -> None:
    rank = dist.get_rank()
    state: dict[str, Any] = {"w": torch.ones(2)}
    smckpt.save(state | {f"of{rank}": {"t": T, "n": rank}}, checkpoint_id=folder)


def test_parts_of_several_ranks_come_with_their_values(tmp_path: Path) -> None:
    run_ranks(each_its_part, 4, str(tmp_path))
    state: dict[str, Any] = {f"of{rank}": {"t": torch.zeros(2), "n": -1} for rank in range(4)}
    smckpt.load({"w": torch.zeros(2), **state}, checkpoint_id=tmp_path)
    assert [part["n"] for part in state.values()] == [0, 1, 2, 3]


def test_keys_that_one_rank_has_load_beside_a_damaged_part_of_another(tmp_path: Path) -> None:
    run_ranks(values_of_late_ranks, 3, str(tmp_path))
    (part,) = (tmp_path / "0").glob("part-*-r00001.json")
    part.write_bytes(part.read_bytes()[:-9])
    state = smckpt.load(checkpoint_id=tmp_path / "0", options=smckpt.LoadOptions(only=["w"]))
    assert state is not None and state.keys() == {"w"}
    with pytest.raises(errors.CorruptCheckpointError, match="r00001"):
        smckpt.load(checkpoint_id=tmp_path / "0")


def stages(folder: str) -> None:
    """Pipeline stages of which one, another, and none has not taken a step."""
    rank = dist.get_rank()
    for idle in (0, 1, 2):
        model = torch.nn.ModuleDict({f"s{rank}": torch.nn.Linear(2, 1, bias=False)})
        optimizer = torch.optim.AdamW(model.parameters())
        if rank != idle:
            model[f"s{rank}"].weight.grad = torch.full((1, 2), rank + 1.0)
            optimizer.step()
        with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        smckpt.save(state, checkpoint_id=f"{folder}/{idle}")


def test_stages_become_one_whichever_of_them_has_no_state_yet(tmp_path: Path) -> None:
    run_ranks(stages, 2, str(tmp_path))
    for idle in (0, 1, 2):
        saved, resharded, file = (tmp_path / f"{idle}{end}" for end in ("", ".one", ".pt"))
        reshard_checkpoint(saved, resharded, shard=1)
        convert(saved, file, to="torch", rank=0)
        steps = {f"s{rank}.weight" for rank in (0, 1) if rank != idle}
        for state in (
            *(smckpt.load(checkpoint_id=at) for at in (saved, resharded)),
            torch.load(file),
        ):
            assert state is not None and state["optimizer"]["state"].keys() == steps
        model = torch.nn.ModuleDict({f"s{r}": torch.nn.Linear(2, 1, bias=False) for r in (0, 1)})
        optimizer = torch.optim.AdamW(model.parameters())
        for at in (saved, resharded):
            with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
                smckpt.load({"model": model, "optimizer": optimizer}, checkpoint_id=at)
            for name, parameter in model.named_parameters():
                moment = optimizer.state[parameter].get("exp_avg")
                assert (moment is not None) == (name in steps)
                assert moment is None or moment[0, 0] == pytest.approx((int(name[1]) + 1) / 10)


def three(folder: str, into: bool) -> Any:
    rank = dist.get_rank()
    own = Kept({} if into else {"t": None if rank == 1 else T + rank, "n": rank})
    state = {"own": own, "w": torch.ones(2)}
    (smckpt.load if into else smckpt.save)(state, checkpoint_id=folder)
    return plain(own.value)


def test_a_rank_takes_the_tensors_and_the_numbers_of_an_object_from_one_rank(
    tmp_path: Path,
) -> None:
    saved = run_ranks(three, 3, str(tmp_path), False)
    assert run_ranks(three, 4, str(tmp_path), True) == [*saved, saved[0]]


def loaded(folder: str, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        own = Kept({})
        state = {"own": own, "w": torch.zeros(2)}
        try:
            smckpt.load(state, checkpoint_id=f"{folder}/{name}/1")
            found[name] = plain(own.value)
            found[f"{name}, no target"] = plain(smckpt.load(checkpoint_id=f"{folder}/{name}/1"))
        except errors.CheckpointError as error:
            found.setdefault(name, type(error).__name__)
        dist.barrier()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_resharded_loads_as_the_checkpoint_that_was_saved(
    tmp_path: Path, ranks: int
) -> None:
    run_ranks(job, 2, str(tmp_path / "saved"))
    whole, refused = [], set()
    for name in FORMS:
        try:
            source, target = (tmp_path / at / name / "1" for at in ("saved", "resharded"))
            reshard_checkpoint(source, target, shard=ranks)
            whole.append(name)
        except errors.UsageError as error:
            assert "'own" in str(error) and not target.exists()
            refused.add(name)
    # One rank would lose what only rank 1 has, and a load on one rank refuses that too.
    assert refused == (LOST if ranks == 1 else set())
    wanted, found = (
        run_ranks(loaded, ranks, str(tmp_path / at), whole) for at in ("saved", "resharded")
    )
    assert found == wanted
    assert all(each[name] != "KeysMismatchError" for each in found for name in whole)

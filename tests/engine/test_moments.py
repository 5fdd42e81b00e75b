"""Ranks that save unequally often: no checkpoint mixes two steps, and the ranks meet again."""

from __future__ import annotations

import itertools
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import smckpt
from smckpt import DistributedFileSystemWriter, errors
from smckpt.engine.saving.differing import ranks_text, refuse_different, tells_nothing
from smckpt.engine.saving.moment import Moment, moment_of
from smckpt.state_dict.select import Selector
from tests.support.launch import run_ranks
from tests.support.limits import seconds

STEPS = 6


class Job:
    """A rank's training: its only weight is the step."""

    def __init__(self, limit: float = 60) -> None:
        self.limit = limit
        self.model = nn.Linear(1, 1, bias=False)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.lr = torch.optim.lr_scheduler.StepLR(self.sgd, 1)

    def step(self, step: int) -> None:
        self.model(torch.ones(1, 1)).sum().backward()
        self.adam.step()
        self.sgd.step()
        self.lr.step()
        with torch.no_grad():
            self.model.weight.fill_(float(step))

    def save(self, folder: str, step: int, how: str) -> Any:
        """Save, so that the thing called `how` is the only one that tells the step."""
        state: dict[str, Any] = {"w": self.model.weight.detach(), "rank": dist.get_rank()}
        more: dict[str, Any] = {}
        number: int | None = None
        place = f"{folder}/c"
        if how == "step=":
            number = step
        elif how == "in the state":
            state["global_step"] = step
        elif how == "a tensor":
            state["trainer"] = {"step": torch.tensor(step)}
        elif how == "nested":
            state["progress"] = {"epoch": step, "note": "here"}
        elif how == "metadata":
            more["metadata"] = {"run": {"epoch": step}, "loss": 0.1 * dist.get_rank()}
        elif how == "metadata text":
            more["metadata"] = {"note": f"after {step}"}
        elif how == "optimizer":
            state["optimizer"] = self.adam.state_dict()
        elif how == "scheduler":
            state["scheduler"] = self.lr.state_dict()
        elif how == "learning rate":
            state["optimizer"] = self.sgd.state_dict()
        elif how == "id":
            place = f"{folder}/c-{step}"
        elif how == "two ids":
            place, number = f"{folder}/c-{step % 2}", step
        options = smckpt.SaveOptions(timeout=seconds(self.limit), **more)
        smckpt.async_save(state, checkpoint_id=place, step=number, options=options)


def skipping(folder: str, how: str, skipped: dict[int, tuple[int, ...]], limit: float = 60) -> Any:
    job, said = Job(limit), []
    for step in range(1, STEPS + 1):
        job.step(step)
        if step in skipped.get(dist.get_rank(), ()):
            continue
        try:
            job.save(folder, step, how)
            smckpt.maybe_finalize_async_calls()
            said.append((step, ""))
        except errors.SaveFailedError as error:
            said.append((step, str(error)))
    target = {"w": torch.zeros(1, 1)}
    last = {"id": f"c-{STEPS}", "two ids": f"c-{STEPS % 2}"}.get(how, "c")
    smckpt.load(target, checkpoint_id=f"{folder}/{last}", check_keys_matched="target")
    return said, float(target["w"])


IN_CI = {("step=", 0), ("optimizer", 1), ("two ids", 1)}
TELL = ["step=", "in the state", "a tensor", "nested", "metadata", "optimizer", "scheduler"]


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        pytest.param(how, rank, marks=() if (how, rank) in IN_CI else pytest.mark.long)
        for how in (*TELL, "two ids")
        for rank in (0, 1)
    ],
)
def test_a_skipped_save_fails_alone_by_name_on_all_ranks(
    tmp_path: Path, how: str, rank: int
) -> None:
    told = run_ranks(skipping, 2, str(tmp_path), how, {rank: (2,)})
    for said, value in told:
        failed = {step: text for step, text in said if text}
        assert len(failed) == 1, failed
        [text] = failed.values()
        assert f"rank {rank} skipped the save that rank {1 - rank} made" in text
        first, second = (1, 2) if how == "optimizer" else (2, 3)  # steps since the last save
        assert f"{first} on rank" in text and f"{second} on rank" in text
        assert value == STEPS
    assert [step for step, text in told[1 - rank][0] if text] == [2]
    assert [step for step, text in told[rank][0] if text] == [3]  # the next call raises it


@pytest.mark.parametrize(
    ("how", "skipped"),
    [
        ("step=", {1: (1,)}),
        pytest.param("step=", {1: (2, 3)}, marks=pytest.mark.long),
        ("step=", {0: (2,), 1: (4,)}),
        pytest.param("optimizer", {0: (1, 2), 1: (4,)}, marks=pytest.mark.long),
        pytest.param("step=", {0: (2,), 1: (2, 3)}, marks=pytest.mark.long),
    ],
)
def test_saves_go_on_after_several_were_skipped(
    tmp_path: Path, how: str, skipped: dict[int, tuple[int, ...]]
) -> None:
    odd = set(skipped.get(0, ())) ^ set(skipped.get(1, ()))
    for rank, (said, value) in enumerate(run_ranks(skipping, 2, str(tmp_path), how, skipped)):
        assert value == STEPS
        assert said[-1] == (STEPS, "")
        assert len([text for _, text in said if text]) <= len(odd), (rank, said)


@pytest.mark.long  # a stage of each refused save waits to its end
@pytest.mark.parametrize("how", ["metadata text", "learning rate", "id"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_only_differs_refuses_mixed_saves(tmp_path: Path, how: str, rank: int) -> None:
    """It does not tell which rank is behind, so the ranks that differ may all fail."""
    for said, value in run_ranks(skipping, 2, str(tmp_path), how, {rank: (3,)}, 10):
        failed = [text for _, text in said if text]
        assert failed and all("rank 0" in text and "rank 1" in text for text in failed)
        if how == "id":
            assert value == STEPS and len(failed) <= 2
            assert any(f"rank {rank} skipped" in text for text in failed)
        else:
            assert value == 2  # the last that both ranks made


def a_group_skips(folder: str, who: tuple[int, ...], how: str) -> Any:
    """Two groups of two ranks; the ranks of `who` skip step 2."""
    rank, job, said = dist.get_rank(), Job(), []
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(1, STEPS + 1):
        job.step(step)
        if rank in who and step == 2:
            continue
        try:
            smckpt.save(
                {"w": job.model.weight.detach(), "optimizer": job.adam.state_dict()},
                checkpoint_id=f"{folder}/c/{rank // 2}",
                process_group=groups[rank // 2],
                step=step if how == "step=" else None,
                options=smckpt.SaveOptions(timeout=seconds(60), groups=[[0, 1], [2, 3]]),
            )
            said.append("")
        except errors.SaveFailedError as error:
            said.append(str(error))
    found = smckpt.latest_checkpoint(folder)
    target = {"w": torch.zeros(1, 1)}
    smckpt.load(
        target,
        checkpoint_id=f"{folder}/c/{rank // 2}",
        process_group=groups[rank // 2],
        options=smckpt.LoadOptions(groups=[[0, 1], [2, 3]]),
        check_keys_matched="target",
    )
    return said, float(target["w"]), found is not None


@pytest.mark.parametrize(
    ("how", "who"),
    [
        pytest.param(how, who, marks=() if (how, who) == ("step=", (0,)) else pytest.mark.long)
        for how in ("step=", "optimizer")
        for who in [(0,), (3,), (0, 1), (2, 3), (1, 2)]
    ],
)
def test_the_groups_of_a_step_meet_again(tmp_path: Path, who: tuple[int, ...], how: str) -> None:
    for said, value, found in run_ranks(a_group_skips, 4, str(tmp_path), who, how):
        # where a rank of each group skipped, each group meets again, and then the groups
        failed, clean = (3, 2) if who == (1, 2) else (2, 3)
        assert 1 <= len([text for text in said if text]) <= failed, said
        assert said[-clean:] == [""] * clean
        assert value == STEPS and found


def each_another_step(folder: str) -> list[str]:
    heard = []
    for number, step in enumerate([dist.get_rank(), 5, 6]):
        options = smckpt.SaveOptions(timeout=seconds(60 if number else 2))
        try:
            smckpt.save(
                {"w": torch.ones(2)}, checkpoint_id=f"{folder}/{number}", step=step, options=options
            )
        except errors.SaveFailedError as error:
            heard.append(f"{number}: {error}")
        dist.barrier()  # as a training step, where rank 0 waits until rank 1 gave its save up
    return heard


def test_a_rank_that_waited_alone_meets_the_others_at_the_next_save(tmp_path: Path) -> None:
    """Each brought another step, and that of rank 1 was the later one, which it brought again."""
    for heard in run_ranks(each_another_step, 2, str(tmp_path)):
        assert heard[0].startswith("0: ") and not any(each.startswith("2: ") for each in heard)
    assert [smckpt.latest_checkpoint(tmp_path / name) is not None for name in "012"] == [
        False, True, True,
    ]  # fmt: skip


# -- what differs between ranks on purpose ---------------------------------------------------------


def trained_late(folder: str, turns: list[tuple[str, str]]) -> list[list[str]]:
    """Saves of an FSDP1 model, whose second layer trains from step 3 on. Each rank holds one layer
    or, in "shared", the second layer on both. Rank 1 of "skips" leaves save 4 out."""
    rank, told = dist.get_rank(), []
    for turn, (how, tells) in enumerate(turns):
        first, second = (6, 10) if how.startswith("shared") else (8, 8)
        layers = [nn.Linear(1, first, bias=False), nn.Linear(1, second, bias=False)]
        model = FSDP(nn.Sequential(*layers), use_orig_params=True, device_id=torch.device("cpu"))
        early, late = model.parameters()
        optimizer = torch.optim.AdamW([early], lr=0.1)
        errors_of: list[str] = []
        for step in range(1, STEPS + 1):
            if step == 3:
                optimizer.add_param_group({"params": [late], "lr": 0.01})
            rests = "rests" in how and step >= 5
            early.grad = late.grad = None
            for parameter in (early, late)[: 1 + (step >= 3) - rests]:
                parameter.grad = torch.ones_like(parameter) if parameter.numel() else None
            optimizer.step()
            if "skips" in how and rank == 1 and step == 4:
                continue
            if "resumes" in how and step < 4:
                continue
            if "sparse" in how and step % 2:  # the second layer begins between two saves
                continue
            if "unequal" in how and step == (6, 4)[rank]:  # as many saves on each rank
                continue
            with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if tells == "a counter":
                state["trainer"] = {"global_step": step}
            if tells == "an option":
                state["args"] = {"train_steps": 1000}
            if tells == "samples":
                state["consumed_samples"] = 8 * step
            ids = {"the id": f"step_{step}", "a fixed number": "2", "epochs": f"{step // 2}"}
            name = ids.get(tells, "c")
            try:
                smckpt.async_save(
                    state,
                    checkpoint_id=f"{folder}/{turn}/{name}",
                    step=step if tells == "step=" else None,
                    options=smckpt.SaveOptions(timeout=seconds(60), queue=str(turn)),
                )
                smckpt.maybe_finalize_async_calls()
            except errors.SaveFailedError as error:
                errors_of.append(str(error))
        told.append(errors_of)
    return told


def test_ranks_that_hold_other_parameters_may_differ_in_step(tmp_path: Path) -> None:
    fine = [("alone", tells) for tells in ("", "step=", "a counter", "the id")]
    fine += [("alone resumes", "step="), ("alone resumes", "the id"), ("shared resumes", "")]
    fine += [("alone sparse", tells) for tells in ("", "epochs", "samples")]
    fine += [("alone sparse rests", "")]
    wrong = [
        ("shared skips", "epochs"),
        ("shared skips", ""),
        ("shared skips", "step="),
        ("alone skips", "step="),
    ]
    wrong += [("alone skips", "a counter")]
    mixed = [("alone unequal", tells) for tells in ("a fixed number", "an option")]
    mixed += [("alone resumes unequal", "a fixed number"), ("alone resumes", "")]
    mixed += [("alone sparse resumes", "epochs")]
    for told in run_ranks(trained_late, 2, str(tmp_path), [*fine, *wrong, *mixed], timeout=240):
        assert told[: len(fine)] == [[]] * len(fine)
        for texts, case in zip(told[len(fine) : -len(mixed)], wrong, strict=True):
            assert len(texts) == 1, (case, texts)
            assert "different steps as one" in texts[0] and "rank 1 skipped the save" in texts[0]
        # Nothing that both ranks have goes on with the saves, so that they never meet again.
        # But ids of its saves do, from the second one on.
        assert [len(texts) for texts in told[-len(mixed) :]] == [2, 2, 2, 3, 1]
        for text in itertools.chain(*told[-len(mixed) :]):
            assert "different steps as one" in text and "pass step=" in text
        # Before a first save nothing tells who is behind, if anybody is.
        assert "skipped the save" in told[-len(mixed)][0] and "skipped" not in str(told[-3:])


def stages_go_on(folder: str, turns: list[str], life: int) -> list[list[str]]:
    """Saves of pipeline stages, of which rank 0's trains from step 3 on, and nothing but the
    optimizer's steps tells one from the next. The second life loads what the first saved."""
    rank, heard = dist.get_rank(), []
    for turn, how in enumerate(turns):
        name = "layer" if "alike" in how else f"layer{rank}"
        stage = nn.ModuleDict({name: nn.Linear(2, 2, bias=False)})
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
        kind = smckpt.SHARDED if "shards" in how else smckpt.LOCAL

        def taken(
            model: nn.Module = stage, optimizer: Any = optimizer, kind: Any = kind
        ) -> dict[str, Any]:
            with smckpt.sm_state_dict_type(model, kind):
                return {"optimizer": optimizer.state_dict(), "model": model.state_dict()}

        if life and "whole" in how:
            whole = smckpt.load(checkpoint_id=f"{folder}/{turn}-")
            optimizer.load_state_dict(whole["optimizer"])
        elif life:
            smckpt.load(taken(), checkpoint_id=f"{folder}/{turn}-")
        errors_of: list[str] = []
        for step in range(1 + 4 * life, 5 + 4 * life):
            if rank == 1 or step >= 3:
                next(stage.parameters()).grad = torch.ones(2, 2)
                optimizer.step()
            if "skips" in how and (rank, step) == (1, 6):
                continue
            if "catches up" in how and step in ((5, 6), (7, 8))[rank]:  # steps as large as rank 1's
                continue
            try:
                options = smckpt.SaveOptions(timeout=seconds(60), queue=str(turn))
                smckpt.async_save(taken(), checkpoint_id=f"{folder}/{turn}-", options=options)
                smckpt.maybe_finalize_async_calls(queue=str(turn))
            except errors.SaveFailedError as error:
                errors_of.append(str(error))
        heard.append(errors_of)
    return heard


def test_stages_that_train_late_save_again_after_a_restart(tmp_path: Path) -> None:
    fine = ["", "whole alike", "shards"]
    turns = [*fine, "skips alike", "catches up", "catches up alike"]
    assert run_ranks(stages_go_on, 2, str(tmp_path), turns, 0) == [[[]] * len(turns)] * 2
    for heard in run_ranks(stages_go_on, 2, str(tmp_path), turns, 1):
        assert heard[: len(fine)] == [[]] * len(fine)
        for texts, turn in zip(heard[len(fine) :], turns[len(fine) :], strict=True):
            assert texts and "different steps as one" in texts[0], turn
            assert "optimizer.step since the last save" in texts[0], turn


class Loader:
    def __init__(self, rank: int) -> None:
        self.at = {"epoch": rank, "step": 7 * rank, "sampler": {"epoch": rank}}

    def state_dict(self) -> dict[str, Any]:
        return self.at

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state


def each_its_own(folder: str) -> str:
    rank = dist.get_rank()
    adam = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    for _ in range(1 + rank):
        adam.param_groups[0]["params"][0].grad = torch.ones(2)
        adam.step()
    for turn in range(2):
        state = {
            "w": torch.ones(2),
            "loss": 0.5 + rank,
            "rank": rank,
            "rng": {"seed": rank, "step": rank},
            "dataloader": Loader(rank),
            "train_iter": {"epoch": rank, "offset": 3 * rank, "noise": torch.ones(rank + 1)},
            "worker": {"epoch": rank},
            "local_steps": rank,
            "own": adam.state_dict(),
        }
        smckpt.save(
            state,
            checkpoint_id=f"{folder}/c",
            step=turn,
            options=smckpt.SaveOptions(
                timeout=seconds(60),
                per_rank=("own.*", "metadata.*"),
                metadata={"host": f"node {rank}", "loss": 0.1 * rank, "rank": rank},
            ),
        )
    return "fine"


def test_what_each_rank_has_of_its_own_is_not_compared(tmp_path: Path) -> None:
    assert run_ranks(each_its_own, 2, str(tmp_path)) == ["fine", "fine"]


def warned(folder: str, words: str, own: bool) -> int:
    """How often the log has these words, while nothing tells four saves apart."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smckpt").addHandler(handler)
    options = smckpt.SaveOptions(metadata={"run": {"loss": 0.5 + own * dist.get_rank()}})
    for _ in range(4):
        smckpt.save({"w": torch.ones(2)}, checkpoint_id=f"{folder}/c", options=options)
    return sum(words in text for text in heard)


def test_where_nothing_tells_a_warning_does_once(tmp_path: Path) -> None:
    words = "nothing in the state tells two steps apart"
    assert run_ranks(warned, 2, str(tmp_path), words, False) == [1, 0]


@pytest.mark.parametrize("own", [True, False])
def test_a_warning_names_the_ranks_whose_metadata_is_not_recorded(
    tmp_path: Path, own: bool
) -> None:
    words = "the metadata and metrics of rank 1 are not those of rank 0, which are recorded"
    assert run_ranks(warned, 2, str(tmp_path), words, own) == [int(own), 0]


def planned_by_one(folder: str) -> list[str]:
    """Saves and loads in which one rank gives planner=, and what each says; then all together."""
    said: list[str] = []

    def make(call: Any, name: str, planner: Any) -> None:
        try:
            call({"w": torch.ones(2)}, checkpoint_id=f"{folder}/{name}", planner=planner)
            said.append("")
        except errors.CheckpointError as error:
            said.append(str(error))

    for who in (0, 1):  # before the first save of ours, and after it
        mine = dist.get_rank() == who
        make(smckpt.save, f"mixed {who}", DefaultSavePlanner() if mine else None)
        make(smckpt.save, "ours", None)
        make(smckpt.save, "planned", DefaultSavePlanner())
        make(smckpt.load, "ours", DefaultLoadPlanner() if mine else None)
        make(smckpt.load, "ours", None)
        make(smckpt.load, "planned", DefaultLoadPlanner())
    return said


def test_a_planner_on_one_rank_alone_fails_by_name_on_all(tmp_path: Path) -> None:
    """DCP would wait for the other rank in its collectives, and that one for a part of this."""
    for said in run_ranks(planned_by_one, 2, str(tmp_path), timeout=120):
        for who, turn in enumerate((said[:6], said[6:])):
            assert f"rank {who} gave planner=" in turn[0], said
            assert f"load(planner=) on rank {who}" in turn[3], said
            assert [*turn[1:3], *turn[4:]] == [""] * 4, said


def planned_skipped(folder: str, by: str, tells: str) -> list[Any]:
    """Rank 1 leaves the second of three saves out."""
    said: list[Any] = []
    for turn, step in enumerate((1, 2, 3) if dist.get_rank() == 0 else (1, 3)):
        state: dict[str, Any] = {"w": torch.full((4,), float(step))}
        if tells == "a counter":
            state["trainer"] = {"global_step": step}
        if tells == "an optimizer":
            state["optimizer"] = {"state": {"w": {"step": torch.tensor(float(step))}}}
        # named by the turn on each rank, where the id does not tell
        name = f"{folder}/{step if tells == 'the id' else turn}"
        writer = DistributedFileSystemWriter(name, step=step if tells == "step=" else None)
        try:
            if by == "dcp.save":
                dcp.save(state, storage_writer=writer)
            else:
                smckpt.save(state, storage_writer=writer, planner=DefaultSavePlanner())
        except (errors.CheckpointError, CheckpointException) as error:
            said.append(str(error))
            break
        said.append("")
    dist.barrier()
    return [said, sorted(Path(one.path).name for one in smckpt.find_checkpoints(folder))]


@pytest.mark.parametrize("tells", ["a counter", "an optimizer", "step=", "the id"])
@pytest.mark.parametrize("by", ["planner=", "dcp.save"])
def test_a_rank_that_skipped_a_save_that_dcp_plans_is_named(
    tmp_path: Path, by: str, tells: str
) -> None:
    for said, found in run_ranks(planned_skipped, 2, str(tmp_path), by, tells, timeout=120):
        assert said[0] == "" and len(said) == 2, said
        assert "rank 1 skipped the save" in said[1] or "different checkpoint ids" in said[1], said
        assert found == ["1" if tells == "the id" else "0"]


def refused_by_one(folder: str) -> list[str]:
    """A planned save and load, of which one rank gives an argument that planners do not take."""
    said: list[str] = []
    options = smckpt.SaveOptions(metadata={"a": 1}) if dist.get_rank() else None
    keys: Any = "target" if dist.get_rank() else True
    for act in (
        lambda: smckpt.save(
            {}, checkpoint_id=folder, planner=DefaultSavePlanner(), options=options
        ),
        lambda: smckpt.load(
            {}, checkpoint_id=folder, planner=DefaultLoadPlanner(), check_keys_matched=keys
        ),
    ):
        try:
            act()
        except errors.CheckpointError as error:
            said.append(str(error))
    return said


def test_a_refusal_of_a_planned_call_reaches_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(refused_by_one, 2, str(tmp_path)):
        assert "SaveOptions(metadata=) has no effect" in said[0]
        assert "check_keys_matched= has no effect" in said[1]


def test_a_moment_takes_tens_of_bytes() -> None:
    many = {f"o{n}": {"state": {0: {"step": n}}, "param_groups": []} for n in range(100)}
    many["counters"] = {f"step_{n}": {"epoch": n} for n in range(100)}
    moment = moment_of("d", 3, {}, Selector(0).select(many))
    assert len(str(moment)) < 600
    assert moment.signs["step"] == 3 and moment.signs["optimizers' step"] == 99


def test_a_stage_is_not_beyond_another_one_by_the_steps_of_its_own_parameters() -> None:
    """Such as the one that a rank gave up, which comes later here: it is the same save."""
    given_up = Moment("d", {"optimizer.step": 8}, of_parameters={"optimizer.step": {"a": 8}})
    late = Moment("d", {"optimizer.step": 10}, of_parameters={"optimizer.step": {"b": 10}})
    assert not late.is_beyond(given_up) and not given_up.is_beyond(late)
    shared = Moment("d", {"optimizer.step": 10}, of_parameters={"optimizer.step": {"a": 10}})
    assert shared.is_beyond(given_up) and not given_up.is_beyond(shared)
    step = {"step": 3}
    assert not replace(shared, signs=step).is_beyond(replace(given_up, signs=step))


def test_nothing_tells_a_skipped_save_where_a_stage_rests() -> None:
    """Its steps stand still whether it skips or not, and those of the other one have no scale."""

    def stages(first: int, second: int, **others: int) -> dict[int, Moment]:
        steps = {"a": first}, {"b": second}
        return {
            rank: Moment("d", {"o": n, **others}, of_parameters={"o": of})
            for rank, (of, n) in enumerate(zip(steps, (first, second), strict=True))
        }

    assert tells_nothing(stages(9, 15), stages(9, 12))
    assert not tells_nothing(stages(12, 15), stages(9, 12))  # the steps since the last save do
    assert not tells_nothing(stages(9, 15, step=3), stages(9, 12, step=2))
    alike = {
        rank: replace(each, of_parameters={"o": {"a": 9}}) for rank, each in stages(9, 9).items()
    }
    assert not tells_nothing(alike, alike)
    shared = {
        rank: replace(each, of_parameters={"o": {"a": 9, "b": each.signs["o"]}})
        for rank, each in stages(9, 15).items()
    }
    assert tells_nothing(shared, {0: shared[0], 1: replace(shared[1], signs={"o": 12})})
    untrained = replace(shared[0], signs={}, of_parameters={})
    assert tells_nothing({0: untrained, 1: shared[1]}, {0: untrained})
    assert not tells_nothing({0: untrained, 1: shared[1]}, {0: untrained, 1: shared[1]})


@pytest.mark.parametrize("before", [{"a": 7, "b": 3}, {"a": 7}], ids=["goes on", "begins"])
def test_a_skipped_save_is_found_where_the_parameter_of_most_steps_rests(
    before: dict[str, int],
) -> None:
    """The largest step of the optimizer stands still then, on the ranks that skip too."""

    def moment(**steps: int) -> Moment:
        return Moment("latest", {"o": max(steps.values())}, of_parameters={"o": {**steps}})

    last = {rank: moment(**before) for rank in range(2)}
    mixed = {0: moment(a=7, b=6), 1: moment(a=7, b=4)}
    with pytest.raises(errors.UsageError, match="since the last save is"):
        refuse_different(mixed, ranks_text, values=True, last=last)
    refuse_different({0: mixed[0], 1: mixed[0]}, ranks_text, values=True, last=last)


def alone_then_together(folder: str, who: int, met: bool) -> list[str]:
    """One rank loads alone and gives up; then all ranks load, twice, and save."""
    rank, state = dist.get_rank(), {"w": torch.ones(2)}
    smckpt.save(state, checkpoint_id=f"{folder}/a")
    if met:
        smckpt.load(state, checkpoint_id=f"{folder}/a")
    heard = []
    if rank == who:
        heard.append(refused(folder, smckpt.LoadOptions(timeout=3)))
    dist.barrier()
    if met and rank != who:  # this rank's call is the one that the other gave up
        heard.append(refused(folder, smckpt.LoadOptions()))
    for _ in range(2):
        smckpt.load(state, checkpoint_id=f"{folder}/a")
    smckpt.save(state, checkpoint_id=f"{folder}/b")
    return heard


def refused(folder: str, options: smckpt.LoadOptions) -> str:
    with pytest.raises(errors.PeerError) as caught:
        smckpt.load({"w": torch.zeros(2)}, checkpoint_id=f"{folder}/a", options=options)
    return str(caught.value)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("met", [False, True], ids=["the first load", "a later load"])
def test_ranks_meet_again_after_one_gave_up_a_load_that_the_others_did_not_make(
    tmp_path: Path, who: int, met: bool
) -> None:
    heard = run_ranks(alone_then_together, 2, str(tmp_path), who, met, timeout=60)
    for rank, texts in enumerate(heard):
        assert len(texts) == (met or rank == who)
        assert all(f"rank {1 - who} did not" in text for text in texts), texts


def each_another(folder: str) -> list[str]:
    """Loads in which each rank passes another checkpoint_id."""
    rank, heard = dist.get_rank(), []
    for step in (1, 2):
        smckpt.save({"w": torch.full((2,), step)}, checkpoint_id=f"{folder}/{step}", step=step)
    if rank:
        shutil.copytree(f"{folder}/2", f"{folder}/copy")  # as on a disk of this host
    for name in ("1", "2") if rank else ("2", "1"):
        target = {"w": torch.zeros(2, dtype=torch.int64)}
        with pytest.raises(errors.UsageError) as caught:
            smckpt.load(target, checkpoint_id=f"{folder}/{name}")
        assert not target["w"].any()
        heard.append(str(caught.value))
    for name in ("2", "copy" if rank else "2"):
        target["w"].zero_()
        smckpt.load(target, checkpoint_id=f"{folder}/{name}")
        assert target["w"].tolist() == [2, 2]
    return heard


def test_ranks_that_load_from_different_places_load_one_commit(tmp_path: Path) -> None:
    for heard in run_ranks(each_another, 2, str(tmp_path)):
        for text, (first, second) in zip(heard, (("2", "1"), ("1", "2")), strict=True):
            assert f"this rank loads from {tmp_path}/{second}, which does not hold" in text
            assert f"its group loads from {tmp_path}/{first}" in text and "rank 1" in text

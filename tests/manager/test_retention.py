"""What is deleted, when, and what never is: on the files of real saves, without torch."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from smckpt import find_checkpoints, verify_checkpoint
from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.commits.discover import FoundCheckpoint, found_at
from smckpt.checkpoint.commits.remove import finish_removals, pinned, remove_checkpoint
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.manager.retention import Best, Every, Newest, Retention, Rivals, policies_of
from smckpt.storage import open_storage
from smckpt.storage.disk.posix import PosixStorage
from tests.support import synthetic
from tests.support.faults.copies import contents, killed_at
from tests.support.limits import seconds
from tests.support.saves import Group, hybrid
from tests.support.synthetic import Step, kept, on_mesh

RUN = "a" * 12


def recorded(run: str | None = RUN, **metrics: float) -> dict[str, Any]:
    return {"metrics": metrics, **({"manager": {"run": run}} if run else {})}


def saved(root: Path, *steps: int, run: str | None = RUN, **metrics: float) -> None:
    """A checkpoint of one group and two ranks for each step."""
    for step in steps:
        group = Group(root / str(step), (0, 1), session=f"{step:012x}")
        group.save(step=step, metadata=recorded(run, **metrics))


def keeper(root: Path | str, last: int = 1) -> Retention:
    return Retention(steps_of(root), (Newest(last),), RUN)


def steps_of(root: Path) -> RunDirectory:
    return RunDirectory(open_storage(str(root)), Template("{step}"))


def steps(root: Path | str) -> list[int | None]:
    return [one.step for one in find_checkpoints(root)]


# -- the rule ------------------------------------------------------------------------------------


def found(step: int, at: int | None = None, **metrics: float) -> FoundCheckpoint:
    return FoundCheckpoint(
        f"/r/{step}", step, 1, 0, step if at is None else at, "LOCAL", 1, ("",), "x",
        {"metrics": metrics},
    )  # fmt: skip


def kept_of(policy: Any, steps: list[FoundCheckpoint], bad: tuple[int, ...] = ()) -> list[int]:
    stay = policy.kept(steps, lambda one: one.step not in bad)
    return [one.step or 0 for one in steps if one in stay]


def test_the_newest_n_stay_and_those_that_are_not_whole_do_not_count() -> None:
    line = [found(step) for step in (10, 20, 30, 40, 50)]
    assert kept_of(Newest(2), line) == [40, 50]
    assert kept_of(Newest(2), line, bad=(50,)) == [30, 40, 50]
    assert kept_of(Newest(2), line, bad=(40, 30)) == [20, 30, 40, 50]
    assert kept_of(Newest(1), line, bad=(10, 20, 30, 40, 50)) == [10, 20, 30, 40, 50]
    assert kept_of(Newest(9), line) == [10, 20, 30, 40, 50]


def test_the_arguments_of_a_manager_are_policies() -> None:
    best = Best("loss", 3)
    assert policies_of(None, ()) == ()
    assert policies_of(3, (best,)) == (Newest(3), best)
    assert policies_of(0, ()) == (Newest(1),)  # no rule deletes the newest


def test_every_kth_stays_and_so_do_the_best() -> None:
    line = [found(step, loss=loss) for step, loss in ((10, 3.0), (15, 1.0), (20, 2.0), (25, 9.0))]
    assert kept_of(Every(10), line) == [10, 20]
    assert kept_of(Best("loss"), line) == [15]
    assert kept_of(Best("loss"), line, bad=(15,)) == [15, 20]
    assert kept_of(Best("loss", 2, "max"), line) == [10, 25]
    assert kept_of(Best("nothing", 2, "max"), line) == []


def test_a_metric_that_is_no_number_is_never_the_best() -> None:
    line = [found(1, loss=float("nan")), found(2, loss=5.0), found(3, loss=float("-inf")), found(4)]
    assert Best("loss").ranked(line) == [line[1]]
    equal = [found(1, loss=1.0), found(2, loss=1.0)]
    assert Best("loss", mode="max").ranked(equal)[0] == "/r/2"


def test_after_a_step_back_what_is_saved_since_stays() -> None:
    """Steps 40 and 50 are of a line that was left at 20; the run saved 30 just now."""
    line = [found(10, 1), found(20, 2), found(40, 3), found(50, 4), found(30, 5)]
    assert kept_of(Newest(1), line) == [50, 30]
    assert kept_of(Newest(2), line) == [40, 50, 30]


@pytest.mark.parametrize(
    "policy",
    [
        partial(Newest, 0), partial(Newest, 1.0), partial(Newest, True), partial(Every, 0),
        partial(Best, "loss", 1, "least"), partial(Best, "loss", 0), partial(Best, 3),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(policy: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        policy()


@dataclass(frozen=True)
class Mine:
    """A user's policy."""

    choose: Callable[[Any, Any], Any]

    def kept(self, steps: Any, whole: Any) -> Any:
        return self.choose(steps, whole)


def test_a_policy_of_the_user_keeps_steps_beside_the_others(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (15, 1.0), (20, 2.0), (25, 9.0), (30, 9.0)):
        saved(tmp_path, step, loss=loss)
    next((tmp_path / "15").glob("data-*")).unlink()
    low = Mine(
        lambda steps, whole: (
            one for one in steps if one.metadata["metrics"]["loss"] < 2.5 and whole(one)
        )
    )
    gone = Retention(steps_of(tmp_path), (Newest(1), Every(25), low), RUN).tidy("30")
    assert [one.step for one in gone] == [10, 15]


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (lambda steps, whole: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda steps, whole: None, "raised TypeError"),
        (lambda steps, whole: [20], "keeps '20', which is none of the steps"),
    ],
)
def test_where_a_policy_of_the_user_fails_nothing_goes(
    tmp_path: Path, choose: Any, says: str
) -> None:
    saved(tmp_path, 10, 20, 30)
    with pytest.raises(UsageError, match=says):
        Retention(steps_of(tmp_path), (Newest(1), Mine(choose)), RUN).tidy("30")
    assert steps(tmp_path) == [10, 20, 30]


# -- on disk -------------------------------------------------------------------------------------


def test_what_is_not_kept_goes_and_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    gone = keeper(tmp_path).tidy("30")
    assert [one.step for one in gone] == [10, 20]
    assert os.listdir(tmp_path) == ["30"]
    assert verify_checkpoint(tmp_path / "30").ok


def test_nothing_goes_before_something_newer_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    data = next((tmp_path / "30").glob("data-*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    assert keeper(tmp_path).tidy("30") == []
    data.unlink()
    assert keeper(tmp_path).tidy("30") == []
    next((tmp_path / "30").glob("manifest-*")).unlink()
    assert keeper(tmp_path).tidy("30") == []
    assert steps(tmp_path) == [10, 20]


def test_what_was_saved_last_stays_though_step_and_clock_say_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went back to step 20, and then the clock was set back."""
    saved(tmp_path, 10, 20, 40, 50)
    earlier = time.time_ns() - 86400 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: earlier)
        saved(tmp_path, 30)
    assert [one.step for one in keeper(tmp_path).tidy("30")] == [10, 20, 40]
    assert steps(tmp_path) == [30, 50]


def test_a_step_that_was_saved_anew_meanwhile_is_not_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    (ten, _) = find_checkpoints(tmp_path)
    Group(tmp_path / "10", (0, 1), session="c" * 12).save(step=10, metadata=recorded())
    before = contents(tmp_path)
    assert not steps_of(tmp_path).remove(ten)
    assert contents(tmp_path) == before


def test_one_that_is_not_whole_does_not_count_towards_n(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40)
    next((tmp_path / "30").glob("part-*")).unlink()
    assert [one.step for one in keeper(tmp_path, 2).tidy("40")] == [10]
    assert sorted(os.listdir(tmp_path)) == ["20", "30", "40"]


def test_what_others_wrote_stays(tmp_path: Path) -> None:
    saved(tmp_path, 10, run="b" * 12)  # another run
    saved(tmp_path, 20, run=None)  # a save by hand
    saved(tmp_path, 30, 40)
    Group(tmp_path / "best", (0,)).save(step=1, metadata=recorded())  # no name of the template's
    (tmp_path / "35").mkdir()
    (tmp_path / "35" / "notes.txt").write_text("mine")
    (tmp_path / "30" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    assert [one.step for one in keeper(tmp_path).tidy("40")] == [30]
    left = contents(tmp_path)
    assert left.items() <= before.items()
    assert before.keys() - left.keys() == {
        way for way in before if way.startswith("30/") and not way.endswith(".txt")
    }


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere", 10)
    root = tmp_path / "root"
    saved(root, 20, 30)
    (root / "10").symlink_to(tmp_path / "elsewhere" / "10")
    before = contents(tmp_path / "elsewhere")
    assert [one.step for one in keeper(root).tidy("30")] == [20]
    assert contents(tmp_path / "elsewhere") == before


def test_a_step_whose_group_is_a_link_is_not_deleted_at_all(tmp_path: Path) -> None:
    mesh = hybrid((0, 1, 2, 3), 2)
    made = synthetic.state(
        [on_mesh("w", (10, 6), mesh, "R S0"), kept("step")],
        synthetic.whole({"w": (10, 6), "step": ()}),
    )
    root = tmp_path / "root"
    Step(root / "10", {"part0": (0, 2), "part1": (1, 3)}, made).save(step=10, metadata=recorded())
    shutil.move(root / "10" / "part1", tmp_path / "elsewhere")
    (root / "10" / "part1").symlink_to(tmp_path / "elsewhere")
    saved(root, 20)
    before = contents(root), contents(tmp_path / "elsewhere")
    keeper(root).tidy("20")
    assert (contents(root), contents(tmp_path / "elsewhere")) == before


def test_a_link_that_somebody_puts_there_during_a_deletion_is_not_followed(tmp_path: Path) -> None:
    mesh = hybrid((0, 1, 2, 3), 2)
    made = synthetic.state([on_mesh("w", (10, 6), mesh, "R S0")], synthetic.whole({"w": (10, 6)}))
    Step(tmp_path / "10", {"part0": (0, 2), "part1": (1, 3)}, made).save(step=10)
    (ten,) = find_checkpoints(tmp_path)
    group, elsewhere = tmp_path / "10" / "part1", tmp_path / "elsewhere"
    storage = open_storage(str(tmp_path / "10"))
    read = contents_of(storage)

    def refused_behind_a_link(call: Callable[[], object]) -> None:
        shutil.move(group, elsewhere)
        group.symlink_to(elsewhere)
        before = contents(tmp_path / "10"), contents(elsewhere)
        with pytest.raises(UsageError, match="symbolic link"):
            call()
        assert (contents(tmp_path / "10"), contents(elsewhere)) == before
        group.unlink()
        shutil.move(elsewhere, group)

    refused_behind_a_link(lambda: remove_checkpoint(read))  # it is not marked either
    assert killed_at(1, lambda: steps_of(tmp_path).remove(ten))  # marked, nothing deleted
    refused_behind_a_link(lambda: finish_removals(storage))


def test_in_s3_too(tmp_path: Path, s3_root: str) -> None:
    for step in (10, 20):
        Group(f"{s3_root}/{step}", (0, 1), session=f"{step:012x}").save(  # type: ignore[arg-type]
            step=step, metadata=recorded()
        )
    assert [one.step for one in keeper(s3_root).tidy("20")] == [10]
    assert {way.split("/")[0] for way in contents(s3_root)} == {"20"}
    assert open_storage(f"{s3_root}/10").list() == []


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [False, True])
def test_a_deletion_killed_at_any_call_loses_nothing_else_and_is_finished(
    tmp_path: Path, groups: bool
) -> None:
    mesh = hybrid((0, 1, 2, 3), 2)
    made = synthetic.state(
        [on_mesh("w", (10, 6), mesh, "R S0"), kept("step")],
        synthetic.whole({"w": (10, 6), "step": ()}),
    )
    root = tmp_path / "root"
    for step in (10, 20):
        if groups:
            Step(root / str(step), {"part0": (0, 2), "part1": (1, 3)}, made).save(
                step=step, metadata=recorded()
            )
        else:
            saved(root, step)
    kept_files = {way: data for way, data in contents(root).items() if way.startswith("20/")}
    for moment in itertools.count():
        place = shutil.copytree(root, tmp_path / f"killed-{moment}")
        killed = killed_at(moment, lambda at=place: keeper(at).tidy("20"))
        left = contents(place)
        assert kept_files.items() <= left.items()
        # whole, or no checkpoint at all; `found_at` raises where it is half of one
        ten = found_at(open_storage(str(place / "10")))
        assert ten is None or verify_checkpoint(ten).ok, moment
        keeper(place).tidy("20")  # the next run
        assert sorted(os.listdir(place)) == ["20"], moment
        assert contents(place) == kept_files
        if not killed:
            break
    assert moment > 8


def test_a_store_that_fails_is_asked_again_after_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    delete, left = PosixStorage.delete, [3]

    def failing(self: PosixStorage, name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("the store is away", path=self.url)
        delete(self, name)

    monkeypatch.setattr(PosixStorage, "delete", failing)
    one = keeper(tmp_path)
    assert one.tidy("20") == []
    monkeypatch.setattr(PosixStorage, "delete", delete)
    saved(tmp_path, 30)
    one.tidy("30")
    assert os.listdir(tmp_path) == ["30"]


# -- readers -------------------------------------------------------------------------------------


def test_a_pinned_checkpoint_stays_until_its_reader_has_ended(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    with pinned(tmp_path / "10"):
        assert keeper(tmp_path).tidy("20") == []
        assert verify_checkpoint(tmp_path / "10").ok
    assert [one.step for one in keeper(tmp_path).tidy("20")] == [10]
    assert os.listdir(tmp_path) == ["20"]


def test_the_pin_of_a_reader_that_was_killed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    pin = pinned(tmp_path / "10", seconds=100)
    pin.__enter__()
    assert keeper(tmp_path).tidy("20") == []
    later = time.time_ns() + 200 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert [one.step for one in keeper(tmp_path).tidy("20")] == [10]
    assert os.listdir(tmp_path) == ["20"]


def test_the_pin_of_a_host_whose_clock_is_behind_by_less_than_a_minute_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    now = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() - 45 * 10**9)
        pin = pinned(tmp_path / "10", seconds=5)
        pin.__enter__()
    assert keeper(tmp_path).tidy("20") == []
    pin.__exit__(None, None, None)
    assert [one.step for one in keeper(tmp_path).tidy("20")] == [10]


def between(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """`act`, once, just before a file of this name is created exclusively."""
    put, done = PosixStorage.put_exclusive, []

    def put_exclusive(self: PosixStorage, file: str, data: bytes) -> bool:
        if file.startswith(name) and not done:
            done.append(file)
            act()
        return put(self, file, data)

    monkeypatch.setattr(PosixStorage, "put_exclusive", put_exclusive)


def test_who_pins_just_before_the_mark_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    pin = pinned(tmp_path / "10")
    between(monkeypatch, "removing-", lambda: pin.__enter__())
    assert keeper(tmp_path).tidy("20") == []
    assert verify_checkpoint(tmp_path / "10").ok
    assert not list(tmp_path.rglob("removing-*"))
    pin.__exit__(None, None, None)


def test_who_pins_beside_another_reader_waits_for_the_mark_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion puts its mark, sees the first reader's pin, and takes the mark back."""
    saved(tmp_path, 10, 20)
    marked, second = threading.Event(), threading.Event()
    delete = PosixStorage.delete

    def held_back(self: PosixStorage, name: str) -> None:
        if name.startswith("removing-"):
            marked.set()
            assert second.wait(seconds(60))  # until the second reader has seen the mark
        delete(self, name)

    def looked(_: float) -> None:
        second.set()
        tidying.join(seconds(60))

    with pinned(tmp_path / "10"), monkeypatch.context() as patch:
        patch.setattr(PosixStorage, "delete", held_back)
        patch.setattr("smckpt.checkpoint.commits.remove.time.sleep", looked)
        tidying = threading.Thread(target=keeper(tmp_path).tidy, args=("20",), daemon=True)
        tidying.start()
        assert marked.wait(seconds(60))
        with pinned(tmp_path / "10"):
            assert second.is_set() and not list(tmp_path.rglob("removing-*"))
    assert verify_checkpoint(tmp_path / "10").ok


def test_who_pins_what_was_deleted_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    between(monkeypatch, "pin-", lambda: keeper(tmp_path).tidy("20"))
    with pytest.raises(CheckpointNotFoundError, match="being deleted"), pinned(tmp_path / "10"):
        raise AssertionError
    assert os.listdir(tmp_path) == ["20"]


def test_a_directory_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = hybrid((0, 1, 2, 3), 2)
    rules = [on_mesh("w", (10, 6), mesh, "R S0")]
    made = synthetic.state(rules, synthetic.whole({"w": (10, 6)}))
    for step in (10, 20, 30):
        Step(tmp_path / str(step), {"part0": (0, 2), "part1": (1, 3)}, made).save(
            step=step, metadata=recorded()
        )
    deleting = keeper(tmp_path)
    deleting._steps.all()  # reads the steps
    listed: Counter[str] = Counter()
    scan = PosixStorage._scan

    def counted(self: PosixStorage) -> Any:
        listed[os.path.relpath(self.url, tmp_path)] += 1
        return scan(self)

    monkeypatch.setattr(PosixStorage, "_scan", counted)
    assert [one.step for one in deleting.tidy("30")] == [10, 20]
    of_the_deleted = {way: count for way, count in listed.items() if way[:2] in ("10", "20")}
    ways = [f"{step}{group}" for step in (10, 20) for group in ("", "/part0", "/part1")]
    assert of_the_deleted == dict.fromkeys(ways, 1)


def test_who_pins_what_is_being_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    (ten, _) = find_checkpoints(tmp_path)
    assert killed_at(1, lambda: steps_of(tmp_path).remove(ten))  # marked, nothing deleted
    with pytest.raises(CheckpointNotFoundError, match="being deleted"), pinned(tmp_path / "10"):
        raise AssertionError
    assert finish_removals(open_storage(str(tmp_path / "10")))
    with pytest.raises(CheckpointNotFoundError), pinned(tmp_path / "10"):
        raise AssertionError


def test_a_pin_or_a_mark_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    pin = tmp_path / "10" / f"pin-{'0' * 16}.json"
    pin.touch()
    os.truncate(pin, 1 << 42)
    assert keeper(tmp_path).tidy("20") == []
    pin.unlink()
    mark = tmp_path / "10" / f"removing-{1:08d}-{'0' * 12}.json"
    mark.touch()
    os.truncate(mark, 1 << 42)
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        finish_removals(open_storage(str(tmp_path / "10")))
    assert verify_checkpoint(tmp_path / "10").ok


def test_a_mark_that_leads_elsewhere_deletes_nothing(tmp_path: Path) -> None:
    from smckpt.checkpoint.records.sealed import open_json, seal_json

    saved(tmp_path, 10, 20)
    victim = tmp_path / "victim"
    shutil.copytree(tmp_path / "20", victim)
    (ten, twenty) = find_checkpoints(tmp_path)[:2]
    assert killed_at(1, lambda: steps_of(tmp_path).remove(ten))
    (mark,) = (tmp_path / "10").glob("removing-*")
    honest = open_json(mark.read_bytes(), str(mark))
    before = contents(victim), contents(tmp_path / "20")
    for change in (
        {"directory": "../victim"},
        {"directory": "../20"},
        {"manifest": "../victim/" + twenty.identity},
        {"manifest": "notes.txt"},
        {"parts": [[0, ["../victim/x"]]]},
        {"parts": 7},
    ):
        mark.write_bytes(seal_json({**honest, "groups": [{**honest["groups"][0], **change}]}))
        with pytest.raises(Exception, match="cannot be decoded|leads out|no relative"):
            finish_removals(open_storage(str(tmp_path / "10")))
        assert (contents(victim), contents(tmp_path / "20")) == before


ENDS = """
import atexit, logging, sys, threading
import torch, smckpt
from smckpt.checkpoint.commits.run_directory import RunDirectory
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
began, remove = threading.Event(), RunDirectory.remove
def late(self, one):
    began.set()
    atexit.register(threading.current_thread().join, 10)  # it goes on until it ends
    threading.main_thread().join()  # the process is at its exit
    return remove(self, one)
RunDirectory.remove = late
def run(manager):
    for step in (1, 2):
        manager.save(step, {"a": torch.ones(4)}).wait()
    began.wait(60)
    raise SystemExit(143)
manager = smckpt.CheckpointManager(sys.argv[1], keep_last_n=1)
if sys.argv[2] == "block":
    with manager:
        run(manager)
run(manager)
"""


@pytest.mark.parametrize("how", ["block", "no block"])
def test_a_deletion_that_the_end_of_the_process_cuts_short_is_no_error(
    tmp_path: Path, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "run"), how],
        capture_output=True, text=True, timeout=seconds(120), check=False,
    )  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert "ERROR" not in done.stderr and "Traceback" not in done.stderr
    Retention(steps_of(tmp_path / "run"), (Newest(1),), None).tidy("2")
    assert steps(tmp_path / "run") == [2]


ENDS_AT_ONCE = """
import sys, torch, smckpt
manager = smckpt.CheckpointManager(sys.argv[1], keep_last_n=1)
for step in (1, 2, 3):
    manager.save(step, {"a": torch.ones(300_000)})
raise SystemExit(3)
"""


def test_what_is_deleted_while_the_interpreter_ends_is_deleted_whole(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(run)],
        capture_output=True, text=True, timeout=seconds(120), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")
    assert [path.name for path in run.iterdir()] == ["3"]


def test_what_is_known_of_rivals_is_bounded_by_what_is_there(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    rivals = Rivals(kept._steps)
    rivals.refuse("1", RUN)
    for step in range(1, 30):
        saved(tmp_path, step)
        assert rivals.look(str(step))
        kept.tidy(str(step))
    assert len(rivals._ours) <= 3 and len(rivals._others) <= 3

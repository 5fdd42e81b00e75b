"""Too little memory, and too few descriptors: each call works, or ends with an error by name.

Each limit of a range is tried, so that each allocation and each descriptor is the one that is
refused once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from smckpt.engine.background.worker_client import Worker
from smckpt.errors import WorkerError
from tests.engine.test_worker import request
from tests.support import child
from tests.support.limits import seconds

# What a process does under a limit. It prints what came of each call.
UNDER = """
    import os, resource, sys
    import torch, smckpt
    from smckpt.errors import CheckpointError
    from tests.support.limits import seconds

    SIZE = 1 << 20

    def value(step):
        return {"a": torch.full((SIZE,), float(step)), "b": {"c": torch.full((3,), float(step))}}

    def save(place, step):
        smckpt.save(value(step), checkpoint_id=place, step=step,
                    options=smckpt.SaveOptions(queue=f"q{step}", timeout=seconds(60)))

    def load(place):
        target = value(0)
        smckpt.load(target, checkpoint_id=place)
        (found,) = set(target["a"].tolist()) | set(target["b"]["c"].tolist())
        return int(found)

    def tried(call):
        try:
            return call()
        except CheckpointError as error:
            assert error.remedy, error
            return f"{type(error).__name__}: {error}"

    def verify(place):
        report = smckpt.verify_checkpoint(place)
        return True if report.ok else "; ".join(one.what for one in report.problems)

    def manager(root, step):
        with smckpt.CheckpointManager(root, keep_last_n=1, signals=()) as made:
            return made.save(step, {"value": step, **value(step)}).wait() and None
"""
DESCRIPTORS = (
    UNDER
    + """
    place, root = sys.argv[1] + "/one", sys.argv[1] + "/run"
    save(place, 1)
    assert load(place) == 1 and smckpt.verify_checkpoint(place).ok
    manager(root, 1)
    smckpt.maybe_finalize_async_calls()
    from smckpt.engine import api
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    committed, said, step = 1, set(), 1
    for more in range(0, 24):
        for queue in api._RUNTIME.queues(None, None):
            queue._worker.close()  # so that each save starts one
        api._RUNTIME._queues.clear()
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
        step += 1
        saved, loaded = tried(lambda: save(place, step)), tried(lambda: load(place))
        verified = tried(lambda: verify(place))
        kept = tried(lambda: manager(root, step))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
        committed = step if saved is None else committed
        assert loaded == committed or isinstance(loaded, str), (more, loaded, committed)
        assert verified is True or isinstance(verified, str), (more, verified)
        assert load(place) == committed, (more, saved)
        said |= {text for text in (saved, loaded, verified, kept) if isinstance(text, str)}
        newest = smckpt.find_checkpoints(root)[-1]
        assert newest.step == step or isinstance(kept, str), (more, newest, kept)
        assert smckpt.verify_checkpoint(newest).ok
    assert said, "the limit was never reached"
    assert saved is None and kept is None, (saved, kept)  # with enough of them all goes well
    strange = [text for text in said if "report" in text or "open files" not in text]
    assert not strange, strange
    print(len(said))
"""
)
MEMORY = (
    UNDER
    + """
    import psutil
    place = sys.argv[1]
    save(place, 1)
    assert load(place) == 1
    from smckpt.engine import api
    from smckpt.engine.background import worker_client
    plain, committed, said, fine = worker_client._PROGRAM, 1, set(), 0
    for step, most in enumerate(range(24 << 20, 220 << 20, 7 << 20), 2):
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({most}, {most})); "
        worker_client._PROGRAM = limit + plain  # of the worker, as a small cgroup would
        saved = tried(lambda: save(place, step))
        committed = step if saved is None else committed
        assert load(place) == committed, (most, saved)
        said |= {saved} - {None}
        fine += saved is None
    assert fine and said, (fine, said)
    strange = [text for text in said if "please report" in text]
    assert not strange, strange
    worker_client._PROGRAM = plain
    save(place, 1000)
"""
)


@pytest.mark.long
def test_with_too_few_descriptors_each_call_works_or_names_them(tmp_path: Path) -> None:
    said = child.run(DESCRIPTORS, str(tmp_path), timeout=240)
    assert int(said) > 1


@pytest.mark.long
def test_with_too_little_memory_a_save_fails_by_name(
    tmp_path: Path,
) -> None:
    child.run(MEMORY, str(tmp_path), timeout=240)


CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1, version 2


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A control group of its own that may use 64 MiB."""
    limits = {"memory.limit_in_bytes": CGROUPS[0], "memory.max": CGROUPS[1]}
    place = None
    for name, top in limits.items():
        place = top / f"smckpt-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        if (place / name).exists():
            (place / name).write_text(str(64 << 20))
            break
        place.rmdir()
    else:
        pytest.skip("this user may not make a control group with a limit on memory")
    assert place is not None
    yield place
    place.rmdir()


def test_a_worker_that_its_control_group_kills_is_named_with_the_cause(
    tmp_path: Path, small_cgroup: Path
) -> None:
    with closing(Worker()) as worker:
        worker.call(request(tmp_path / "a", None), timeout=seconds(60))
        (small_cgroup / "cgroup.procs").write_text(str(worker.pid))
        large = request(tmp_path / "b", None, part={"objects": "x" * (80 << 20)})
        with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
            worker.call(large, timeout=seconds(60))
        assert "cgroup ran out of memory" in str(caught.value)
        done = worker.call(request(tmp_path / "c", None), timeout=seconds(60))  # by another
        assert (tmp_path / "c" / done.part).exists()
    assert not list((tmp_path / "b").glob("part-*"))

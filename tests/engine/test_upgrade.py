"""smckpt is replaced on disk while a job runs: what runs goes on, and what starts later is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import smckpt
from tests.support import child

# The job runs with a copy of the package, which it upgrades itself.
JOB = """
    import os, signal, sys
    from pathlib import Path
    installed, place = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(installed))
    import torch, smckpt
    from smckpt.engine import api
    from tests.support.limits import seconds
    assert smckpt.__file__.startswith(str(installed))

    def save(step):
        smckpt.save({"a": torch.full((4,), float(step))}, checkpoint_id=place, step=step)

    def worker():
        [queue] = api._RUNTIME.queues(None, None)
        return queue._worker

    def value():
        target = {"a": torch.zeros(4)}
        smckpt.load(target, checkpoint_id=place)
        return float(target["a"][0])

    def upgrade():
        (installed / "smckpt" / "_version.py").write_text('__version__ = "99.0"\\n')
        above = "engine/background"
        files = (
            "checkpoint/commits/commit.py", f"{above}/worker_write.py", f"{above}/commands.py",
            "storage/disk/posix.py",
        )
        for name in files:
            path = installed / "smckpt" / name
            path.write_text(path.read_text() + "\\nraise SystemExit('another version')\\n")
"""


def installed(folder: Path) -> Path:
    package = Path(smckpt.__file__).parent
    shutil.copytree(package, folder / "smckpt", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.long
def test_a_worker_that_runs_goes_on_with_what_it_has_loaded(tmp_path: Path) -> None:
    child.run(
        JOB
        + """
    save(1)
    pid = worker().pid
    upgrade()
    save(2)
    assert worker().pid == pid and value() == 2
    """,
        str(installed(tmp_path / "site")),
        str(tmp_path / "run"),
    )


@pytest.mark.long
def test_a_worker_that_has_not_written_yet_goes_on_too(tmp_path: Path) -> None:
    child.run(
        JOB
        + """
    from smckpt.engine.background.worker_client import Worker
    from smckpt.errors import CheckpointError, WorkerError
    from tests.engine.test_worker import question, request
    one = Worker()
    try:
        one.call(question("are you there"), timeout=seconds(30))
    except WorkerError as error:
        assert "does not know" in str(error), error
    upgrade()
    done = one.call(request(Path(place), None), timeout=seconds(30))
    assert (Path(place) / done.part).exists()
    one.close()
    """,
        str(installed(tmp_path / "site")),
        str(tmp_path / "run"),
    )


def test_a_worker_of_another_version_is_refused_by_name_and_a_restart_goes_on(
    tmp_path: Path,
) -> None:
    site, run = str(installed(tmp_path / "site")), str(tmp_path / "run")
    child.run(
        JOB
        + """
    save(1)
    (installed / "smckpt" / "_version.py").write_text('__version__ = "99.0"\\n')
    os.kill(worker().pid, signal.SIGKILL)
    worker()._process.popen.wait()
    for _ in range(2):
        try:
            save(2)
        except smckpt.SaveFailedError as error:
            assert "smckpt was changed on disk while this job runs" in str(error), error
            assert "99.0" in str(error) and smckpt.__version__ in str(error), error
            assert "restart the job" in str(error), error
        else:
            raise SystemExit("it was not refused")
    assert value() == 1
    assert [name for name in os.listdir(place) if "-r00000" in name] != []
    """,
        site,
        run,
    )
    child.run(  # the job starts again, with the newer version
        JOB
        + """
    assert smckpt.__version__ == "99.0" and value() == 1
    save(2)
    assert value() == 2
    """,
        site,
        run,
    )

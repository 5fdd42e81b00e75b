"""What the trainer can rely on from its worker: that it writes, and that it never hangs it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from smckpt.checkpoint.records.crc import BLOCK, crc64, hex64
from smckpt.checkpoint.records.format import GroupManifest, manifest_name
from smckpt.checkpoint.records.sealed import open_json
from smckpt.engine.background.commands import ArenaFile, Command, PublishRecord, WritePart
from smckpt.engine.background.worker_client import Worker
from smckpt.errors import StorageError, WorkerError
from smckpt.staging.arena import Arena
from tests.support import child
from tests.support.faults import refuse
from tests.support.faults.workers import kill_in_mid_request
from tests.support.limits import seconds

ATTEMPT = "0123456789ab-00000007"


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close(timeout=seconds(5))


def filled(size: int) -> Arena:
    arena = Arena(size)
    arena.view(0, arena.size)[:] = os.urandom(arena.size)
    return arena


def request(directory: Path, arena_id: int | None, *sizes: int, part: Any = None) -> WritePart:
    """Files of these sizes, one after the other in the arena."""
    files, at = [], 0
    for size in sizes:
        files.append(ArenaFile(at, size))
        at += -(-size // 4096) * 4096
    part = part or {"format": [1, 0], "step": 9, "objects": {"ä": "ü"}}
    return WritePart(str(directory), ATTEMPT, 3, arena_id, tuple(files), part)


def question(text: str) -> Command[None]:
    """A command that the worker does not know."""

    class Unknown(Command[None]):
        function = text

    return dataclasses.dataclass(Unknown)()


def test_a_part_is_written_with_its_files_and_their_checksums(
    tmp_path: Path, worker: Worker
) -> None:
    sizes = (9 * BLOCK + 4097, 4096, 17 * BLOCK, 5)
    with closing(filled(30 * BLOCK)) as arena:
        payload = request(tmp_path / "new", worker.attach(arena), *sizes)
        done = worker.call(payload, timeout=seconds(30))
        part_bytes = (tmp_path / "new" / done.part).read_bytes()
        assert done.crc64 == hex64(crc64(part_bytes))
        assert done.bytes == sum(sizes)
        part = open_json(part_bytes, "part")
        assert part["step"] == 9 and part["objects"] == {"ä": "ü"}
        for record, file in zip(part["files"], payload.files, strict=True):
            data = (tmp_path / "new" / record["name"]).read_bytes()
            assert data == arena.view(file.arena_offset, file.size)
            assert record["size"] == len(data) and record["crc64"] == hex64(crc64(data))
            blocks = (tmp_path / "new" / record["crc_name"]).read_bytes()
            expected = [crc64(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
            assert blocks == struct.pack(f"<{len(expected)}Q", *expected)
        assert len(list((tmp_path / "new").iterdir())) == 2 * len(sizes) + 1


def test_a_rank_that_holds_nothing_writes_a_part_alone(tmp_path: Path, worker: Worker) -> None:
    payload = request(tmp_path, None)
    done = worker.call(payload, timeout=seconds(30))
    assert [path.name for path in tmp_path.iterdir()] == [done.part]
    assert done.bytes == 0


def test_new_contents_and_a_new_arena_reach_the_next_save(tmp_path: Path, worker: Worker) -> None:
    for turn in range(2):
        with closing(filled((turn + 1) * BLOCK)) as arena:
            number = worker.attach(arena)
            assert worker.attach(arena) == number
            for again in range(2):
                arena.view(0, 8)[:] = b"%d turn %d" % (turn, again)
                directory = tmp_path / f"{turn}{again}"
                done = worker.call(request(directory, number, BLOCK), timeout=seconds(30))
                part = json.loads((directory / done.part).read_bytes())["body"]
                assert (directory / part["files"][0]["name"]).read_bytes() == arena.view(0, BLOCK)
            worker.detach(number)
    assert held_by(worker.pid) == 0


def test_an_arena_that_was_closed_is_unmapped_and_no_longer_known(
    tmp_path: Path, worker: Worker
) -> None:
    arena = filled(BLOCK)
    number = worker.attach(arena)
    worker.call(request(tmp_path, number, BLOCK), timeout=seconds(30))
    arena.close()
    with pytest.raises(WorkerError, match=f"has no arena {number}"):
        worker.call(request(tmp_path / "2", number, BLOCK), timeout=seconds(30))
    assert held_by(worker.pid) == 0


def test_giving_an_arena_back_does_not_need_a_healthy_worker(
    tmp_path: Path, worker: Worker
) -> None:
    with closing(filled(BLOCK)) as arena:
        number = worker.attach(arena)
        worker.call(request(tmp_path, number, BLOCK), timeout=seconds(30))
        kill_in_mid_request(worker)
        worker.detach(number)
        assert not worker.alive
        worker.detach(number)


def test_a_full_disk_is_raised_here_and_leaves_nothing(tmp_path: Path, worker: Worker) -> None:
    point = tmp_path / "small"
    point.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=8m tmpfs {point} 2>/dev/null"):
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with closing(filled(20 * BLOCK)) as arena:
            number = worker.attach(arena)
            payload = request(point / "run", number, 6 * BLOCK, 6 * BLOCK)
            with pytest.raises(StorageError, match="disk is full") as caught:
                worker.call(payload, timeout=seconds(30))
            assert str(point) in str(caught.value)
            assert list((point / "run").iterdir()) == []
            worker.call(request(point / "run", number, BLOCK), timeout=seconds(30))
    finally:
        os.system(f"umount -l {point}")


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    """The worker inherits a limit on file sizes that the second file exceeds."""
    child.run(
        """
        import os, resource, signal, sys
        from pathlib import Path
        from smckpt.engine.background.worker_client import Worker
        from smckpt.errors import StorageError
        from tests.engine.test_worker import BLOCK, filled, request, seconds
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        arena = filled(12 * BLOCK)
        worker = Worker()
        number = worker.attach(arena)
        directory = Path(sys.argv[1]) / "run"
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, 2 * BLOCK))
        try:
            worker.call(request(directory, number, BLOCK, 9 * BLOCK), timeout=seconds(30))
        except StorageError as error:
            assert "ulimit -f" in str(error), error
        else:
            raise SystemExit("no error")
        assert os.listdir(directory) == []
        worker.close(seconds(5))
        """,
        str(tmp_path),
    )


def test_a_path_that_is_a_file_and_a_name_in_use_are_raised_here(
    tmp_path: Path, worker: Worker
) -> None:
    (tmp_path / "file").touch()
    with closing(filled(BLOCK)) as arena:
        number = worker.attach(arena)
        with pytest.raises(StorageError, match="is a file"):
            worker.call(request(tmp_path / "file", number, 10), timeout=seconds(30))
        worker.call(request(tmp_path / "run", number, 10), timeout=seconds(30))
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        with pytest.raises(StorageError, match="exists already"):
            worker.call(request(tmp_path / "run", number, 10), timeout=seconds(30))
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_command_that_nobody_knows_is_an_error_and_the_worker_goes_on(worker: Worker) -> None:
    for _ in range(2):
        with pytest.raises(WorkerError, match="does not know the command 'dance'"):
            worker.call(question("dance"), timeout=seconds(30))
    pid = worker.pid
    nonsense = question("write_part")  # of another version: its fields are not those of ours
    with pytest.raises(WorkerError, match="failed in the worker: ValueError: Object missing"):
        worker.call(nonsense, timeout=seconds(30))
    assert worker.pid == pid


def test_large_messages_pass_both_ways(tmp_path: Path, worker: Worker) -> None:
    """A part's objects may be megabytes; a socket takes some hundred kilobytes at once."""
    big = "x" * (5 << 20)
    payload = request(tmp_path, None, part={"objects": big})
    done = worker.call(payload, timeout=seconds(60))
    assert (tmp_path / done.part).stat().st_size > len(big)
    with pytest.raises(WorkerError) as caught:
        worker.call(question("x" * (5 << 20)), timeout=seconds(60))
    assert len(str(caught.value)) > len(big)


def test_starting_does_not_wait_until_the_process_answers(worker: Worker) -> None:
    for _ in range(3):
        worker.start()
        process = worker._process
        assert process is not None and not process.ready  # its first word was not waited for
        with pytest.raises(WorkerError, match="does not know"):
            worker.call(question("are you there"), timeout=seconds(30))
        assert process.ready
        kill(worker.pid)
        wait_dead(worker)


def test_the_worker_has_no_torch_and_little_memory(tmp_path: Path) -> None:
    out = child.run(
        """
        import json, sys
        import smckpt.engine.background.worker, smckpt.engine.background.worker_write
        import smckpt.storage
        import smckpt.checkpoint.commits.commit
        heavy = {"torch", "numpy", "boto3", "transformers"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert out == ""
    with closing(Worker()) as worker, closing(filled(64 << 20)) as arena:
        number = worker.attach(arena)
        worker.call(request(tmp_path, number, 64 << 20), timeout=seconds(60))
        memory = psutil.Process(worker.pid).memory_full_info()
        assert memory.uss < 60 << 20, "beside the arena, which it shares"
        maps = Path(f"/proc/{worker.pid}/maps").read_text()
        assert "torch" not in maps


def test_it_runs_at_low_priority_and_holds_nothing_of_the_trainer(worker: Worker) -> None:
    with open(os.devnull) as extra:
        os.set_inheritable(extra.fileno(), True)
        with pytest.raises(WorkerError):
            worker.call(question("?"), timeout=seconds(30))
        process = psutil.Process(worker.pid)
        assert process.nice() - os.getpriority(os.PRIO_PROCESS, 0) in range(1, 11)
        fds = set(open_files(worker.pid))
        kinds = sorted(link.split(":")[0].removeprefix("anon_inode") for link in fds)
        assert len(kinds) <= 4, kinds  # /dev/null, the log, the socket, the trainer's pidfd
        assert process.name() == "smckpt-worker"


@pytest.mark.parametrize("how", ["module", "package", "sitecustomize", "path", "no text"])
def test_what_lies_in_the_current_directory_is_not_taken_for_ours(tmp_path: Path, how: str) -> None:
    trap = "raise SystemExit('the wrong module')"
    if how == "package":
        (tmp_path / "smckpt" / "engine").mkdir(parents=True)
        (tmp_path / "smckpt" / "__init__.py").write_text(trap)
    names = {"module": ["smckpt", "json", "worker", "queue"], "sitecustomize": ["sitecustomize"]}
    for name in names.get(how, []):
        (tmp_path / f"{name}.py").write_text(trap)
    code = f"""
        import os
        import pathlib
        import sys
        from tests.engine.test_worker import Worker, WorkerError, question, seconds
        os.chdir({str(tmp_path)!r})
        os.environ["PYTHONPATH"] = {str(tmp_path) if how == "sitecustomize" else ""!r}
        if {how!r} == "path":  # with modules that the trainer has by now
            sys.path.insert(0, os.getcwd())
            for name in sys.stdlib_module_names & sys.modules.keys():
                pathlib.Path(f"{{name}}.py").write_text({trap!r})
        if {how!r} == "no text":  # as Python does, we skip it
            sys.path[:0] = [pathlib.Path.cwd(), b"/", None]
        try:
            Worker().call(question("?"), timeout=seconds(30))
        except WorkerError as error:
            assert "does not know the command" in str(error), error
    """
    child.run(code)


def test_the_worker_is_a_program_of_its_own_too() -> None:
    """It is run by `python -m`; without its arguments it ends at once."""
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.engine.background.worker"],
        cwd=child.ROOT, capture_output=True,
        timeout=seconds(60),
    )  # fmt: skip
    assert done.returncode == 1


def test_a_worker_that_cannot_start_is_named_with_the_limits(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(WorkerError, match="could not be started: .*No such file.*ulimit"):
        worker.start()


def test_programs_start_where_a_relative_path_led_to_python(tmp_path: Path) -> None:
    """The shell's PATH is `bin:…`, and the script changes its directory: a save, and a keeper.
    smckpt is in a folder that the script adds to the import path, beside modules of the standard
    library's names."""
    if not Path(sys.prefix, "bin", "python").exists():
        pytest.skip("this Python has no bin/python")
    script, vendored = tmp_path / "script.py", tmp_path / "vendored"
    vendored.mkdir()
    (vendored / "smckpt").symlink_to(child.ROOT / "smckpt")
    for name in ("types", "socket", "selectors"):
        (vendored / f"{name}.py").write_text("raise ImportError('not the library')")
    script.write_text(f"""if True:
        import os, sys, torch
        assert not os.path.isabs(sys.executable), sys.executable
        os.chdir({str(tmp_path)!r})
        others = [at for at in sys.path if not os.path.exists(os.path.join(at, "smckpt"))]
        sys.path[:] = [*others, {str(vendored)!r}]
        import smckpt
        assert smckpt.__file__.startswith({str(vendored)!r}), smckpt.__file__
        memory = smckpt.Memory(interval=1)
        with smckpt.CheckpointManager("run", interval=1, memory=memory) as manager:
            assert manager.should_save(1)
            manager.save(1, {{"w": torch.ones(2)}}).result()
            from smckpt.storage.memory.store import asked_locally, job_of
            assert asked_locally(job_of(manager._memory.root), {{"do": "hello"}})["own"]
    """)
    environment = {**os.environ, "PATH": "bin"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["python", str(script)], cwd=sys.prefix, env=environment, text=True,
        capture_output=True, timeout=seconds(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- deaths ------------------------------------------------------------------------------------


def test_a_killed_worker_is_noticed_at_once_and_replaced(tmp_path: Path, worker: Worker) -> None:
    os.mkfifo(tmp_path / "fifo")
    with closing(filled(BLOCK)) as arena:
        number = worker.attach(arena)
        worker.call(request(tmp_path / "a", number, BLOCK), timeout=seconds(30))
        pid = worker.pid
        kill_in_mid_request(worker)
        began = time.monotonic()
        with pytest.raises(WorkerError, match="was killed by SIGKILL during write_part"):
            worker.call(request(tmp_path / "b", number, BLOCK), timeout=seconds(60))
        assert time.monotonic() - began < seconds(20)
        assert not worker.alive
        # The next request starts another, which knows the arena.
        done = worker.call(request(tmp_path / "c", number, BLOCK), timeout=seconds(30))
        assert done.bytes == BLOCK and worker.pid != pid


def test_a_worker_that_died_between_requests_is_replaced(tmp_path: Path, worker: Worker) -> None:
    with closing(filled(BLOCK)) as arena:
        number = worker.attach(arena)
        worker.start()
        kill(worker.pid)
        wait_dead(worker)
        worker.call(request(tmp_path, number, BLOCK), timeout=seconds(30))


def test_a_worker_that_does_not_answer_is_given_up_in_time_and_killed(
    tmp_path: Path, worker: Worker
) -> None:
    with pytest.raises(WorkerError, match="does not know"):
        worker.call(question("?"), timeout=seconds(30))
    pid = worker.pid
    kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    big = request(tmp_path, None, part={"objects": "x" * (20 << 20)})
    with pytest.raises(WorkerError, match=r"did not answer write_part within .* killed"):
        worker.call(big, timeout=1)  # more than the socket takes: it blocks in send
    assert time.monotonic() - began < seconds(30)
    wait_gone(pid)
    with pytest.raises(WorkerError, match="does not know"):
        worker.call(question("?"), timeout=seconds(30))


def test_a_worker_that_crashes_says_why(tmp_path: Path, worker: Worker) -> None:
    group = GroupManifest("group", manifest_name(1, 1, "0" * 12), "0" * 16, 0)
    record = PublishRecord(str(tmp_path), "0" * 12, 1, 1, (group,))
    with pytest.raises(StorageError):
        worker.call(record, timeout=seconds(30))  # it has started, and answers
    kill(worker.pid, signal.SIGSTOP)  # so it is busy with the next request when it crashes

    def crash() -> None:
        wait_until(worker._lock.locked)  # held while a call waits
        kill(worker.pid, signal.SIGSEGV)
        kill(worker.pid, signal.SIGCONT)

    crasher = threading.Thread(target=crash)
    crasher.start()
    with pytest.raises(WorkerError, match=r"SIGSEGV during publish_record.*Fatal Python"):
        worker.call(record, timeout=seconds(30))
    crasher.join()


def test_requests_of_several_threads_wait_for_each_other(worker: Worker) -> None:
    said: list[str] = []

    def ask(i: int) -> None:
        try:
            worker.call(question(f"question {i}"), timeout=seconds(30))
        except WorkerError as error:
            said.append(error.message)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = [f"'question {i}'" for i in range(8)]
    assert sorted(said) == [f"the worker does not know the command {name}" for name in asked]


def test_closing_ends_the_process_and_is_harmless_when_repeated(worker: Worker) -> None:
    worker.start()
    pid = worker.pid
    worker.close(timeout=seconds(5))
    worker.close(timeout=seconds(5))
    assert not psutil.pid_exists(pid)
    with pytest.raises(WorkerError, match="is closed"):
        worker.call(question("?"), timeout=1)


def test_closing_while_a_request_is_under_way_does_not_wait_for_it(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="does not know"):
        worker.call(question("?"), timeout=seconds(30))
    kill(worker.pid, signal.SIGSTOP)
    failures: list[WorkerError] = []

    def ask() -> None:
        try:
            worker.call(question("?"), timeout=seconds(60))
        except WorkerError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(worker._lock.locked)  # held while a call waits
    began = time.monotonic()
    worker.close(timeout=0.5)
    thread.join(timeout=seconds(10))
    assert time.monotonic() - began < seconds(30) and len(failures) == 1


TRAINER = """
    import errno, os, signal, sys, threading, time
    from pathlib import Path
    from dataclasses import replace
    from tests.engine.test_worker import BLOCK, Worker, WorkerError, filled, request
    from tests.engine.test_worker import question, refuse, seconds
    if "no pidfds" in sys.argv:
        refuse.refuse({"pidfd_open": errno.ENOSYS})
    worker = Worker()
    try:
        worker.call(question("?"), timeout=seconds(30))
    except WorkerError:
        print(worker.pid, flush=True)
    if "forked" in sys.argv and os.fork() == 0:  # it inherits all that fork gives, and outlives us
        time.sleep(seconds(60))
    if "busy" in sys.argv:
        arena = filled(64 * BLOCK)
        payload = request(Path(sys.argv[1]), worker.attach(arena), 64 * BLOCK)
        payload = replace(payload, files=payload.files * 30)  # 2 GB: a second's work
        worker.call(payload, timeout=seconds(60))
    time.sleep(seconds(60))
"""


@pytest.mark.parametrize("how", ["idle", "busy", "idle, forked", "busy, forked", "busy, no pidfds"])
def test_a_killed_trainer_takes_its_worker_along_at_once(tmp_path: Path, how: str) -> None:
    if "no pidfds" in how and not refuse.available():
        pytest.skip("no seccomp filter for this platform")
    trainer = subprocess.Popen(
        child.command(TRAINER, str(tmp_path / "run"), *how.split(", ")),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        if "busy" in how:
            wait_until(lambda: any(tmp_path.glob("run/data-*-29.safetensors")))
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        kill(trainer.pid)
        wait_gone(pid)
        assert not any(tmp_path.glob("run/part-*")), "it was to die in the middle of the work"
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
        shutil.rmtree(tmp_path / "run", ignore_errors=True)


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to; one that closes meanwhile is left out."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return links


def test_a_forked_child_cannot_use_the_worker_nor_hold_its_ends(worker: Worker) -> None:
    worker.start()
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            worker.call(question("?"), timeout=1)
        except WorkerError as error:
            os.write(say, error.message.encode())
        os.read(ready, 0)
        signal.pause()
    said = os.read(ready, 1000).decode()
    sockets = open_files(pid)
    kill(pid)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(say)
    assert "a forked child cannot use the worker" in said
    mine = open_files(worker.pid)
    assert not [link for link in sockets if link in mine and link.startswith("socket")]
    assert not [link for link in sockets if "smckpt-worker-stderr" in link]
    assert worker.alive


def test_a_trainer_that_exits_without_closing_leaves_no_worker() -> None:
    pid = int(
        child.run(
            """
            from smckpt.engine.background.worker_client import Worker
            worker = Worker()
            worker.start()
            print(worker.pid)
            """
        )
    )
    wait_gone(pid)


def test_interrupts_and_terminations_are_the_trainers_to_handle(
    tmp_path: Path, worker: Worker
) -> None:
    with closing(filled(BLOCK)) as arena:
        number = worker.attach(arena)
        with pytest.raises(WorkerError, match="does not know"):
            worker.call(question("?"), timeout=seconds(30))
        pid = worker.pid
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            kill(pid, signum)
        worker.call(request(tmp_path, number, BLOCK), timeout=seconds(30))
        assert worker.pid == pid
        assert os.getsid(pid) != os.getsid(0)


def test_many_workers_in_turn_leave_no_descriptor_behind() -> None:
    """In a process of its own: what other tests left may close its descriptors meanwhile."""
    child.run(
        """
        import os
        from tests.engine.test_worker import Worker, WorkerError, closing, pytest, question, seconds

        def turn():
            with closing(Worker()) as worker, pytest.raises(WorkerError):
                worker.call(question("?"), timeout=seconds(30))
            return sorted(os.listdir("/proc/self/fd"))

        before = turn()
        for _ in range(3):
            after = turn()
        assert after == before, (before, after)
        """
    )


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    os.kill(pid, signum)


def wait_gone(pid: int) -> None:
    """Until the process is dead; a zombie is."""

    def gone() -> bool:
        try:
            process = psutil.Process(pid)
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(gone)


def wait_dead(worker: Worker) -> None:
    """Until its parent can tell: a process is a zombie a moment before."""
    wait_until(lambda: not worker.alive)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds(30)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def held_by(pid: int) -> int:
    """Descriptors and mappings of arenas."""
    links = open_files(pid)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("smckpt-arena" in text for text in [*links, *maps])

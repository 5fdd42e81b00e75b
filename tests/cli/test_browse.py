"""`smckpt browse`: the facts on its page, without a browser and without torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from smckpt.checkpoint.reading.blocks import SavedFile
from smckpt.cli.app import app
from smckpt.cli.browse import EVENTS, RANKS, page_of, read_timeline, write_page
from smckpt.cli.browse_facts import Facts
from smckpt.errors import UsageError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.manager.doctor import examine
from smckpt.storage import open_storage
from tests.cli.test_runs import command
from tests.support.faults.forge import Change, reforge, seal_record
from tests.support.faults.swaps import swap, swapped_at
from tests.support.s3 import Server
from tests.support.saves import Group, State, hybrid, state_of
from tests.support.synthetic import Step

TOPOLOGY = {"world_size": 4, "hybrid_shard_degree": 2, "replication_degree": 2}


def save(root: Path, step: int, **part: Any) -> Path:
    """A step of four ranks on two hosts."""
    ranks = (0, 1, 2, 3)
    state = part.pop("state", None) or state_of(hybrid(ranks, 2))
    group = Group(root / str(step), ranks, session=f"{step:012x}", state=state)
    usual = {"topology": TOPOLOGY, "host": lambda rank: f"node{rank // 2}"}
    group.save(step=step, **{**usual, **part})
    return root / str(step)


def change_last_byte(step: Path) -> None:
    data = next(step.glob("data-*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))


def facts_in(page: Path | bytes) -> Any:
    """The JSON in a page's data block."""
    text = (page if isinstance(page, bytes) else page.read_bytes()).decode()
    (data,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)
    return json.loads(data)


def browsed(root: Path | str, out: Path, *options: str | Path) -> Any:
    """The facts on the page that the command writes, run in this process."""
    done = CliRunner().invoke(app, ["browse", *map(str, (root, "--out", out, *options))])
    assert done.exit_code == 0, (done.output, done.exception)
    assert str(out) in done.output.replace("\n", "") or not str(out).isprintable()
    return facts_in(out)


def refused(*arguments: str | Path) -> str:
    """Why the command makes no page."""
    done = CliRunner().invoke(app, ["browse", *map(str, arguments)])
    assert done.exit_code != 0
    return str(done.exception) + done.output


def tensors_of(facts: Any, step: Any) -> list[list[Any]]:
    table = facts["shared"][step["shared"]["tensors"]]
    return [facts["rows"][i] for first, count in table for i in range(first, first + count)]


# -- facts -------------------------------------------------------------------------------------


def test_the_page_tells_runs_steps_topology_writers_and_tensors(tmp_path: Path) -> None:
    for run in ("a", "b"):
        save(tmp_path / run, 10, metadata={"metrics": {"loss": 0.5}})
    cut = save(tmp_path / "b", 20)
    data = next(cut.glob("data-*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    left = Group(tmp_path / "b" / "30", (0, 1), session="d" * 12)
    left.lease()
    left.write_rank(1, 0, step=30)
    facts = browsed(tmp_path, tmp_path / "page.html")
    by_run = {run["name"]: run for run in facts["runs"]}
    assert sorted(by_run) == ["a", "b"]
    states = {s["place"]: s["state"] for s in facts["steps"]}
    assert states == {"a/10": "whole", "b/10": "whole", "b/20": "cut", "b/30": "unfinished"}
    assert facts["steps"][by_run["b"]["restorable"]]["place"] == "b/10"
    step = facts["steps"][by_run["a"]["steps"][0]]
    assert (step["step"], step["kind"], step["metadata"]) == (
        10, "LOCAL", {"metrics": {"loss": 0.5}},
    )  # fmt: skip
    assert facts["shared"][step["shared"]["topology"]] == TOPOLOGY
    assert facts["shared"][step["shared"]["groups"]] == [[0, 1, 2, 3]]
    writers = facts["shared"][step["shared"]["writers"]]
    assert [row[:2] for row in writers] == [[r, f"node{r // 2}"] for r in range(4)]
    for rank, _, directory, group, sizes in writers:
        for number, size in enumerate(sizes):
            name = f"data-{step['attempts'][group]}-r{rank:05d}-{number}.safetensors"
            assert (tmp_path / "a" / "10" / directory / name).stat().st_size == size
    named = {row[0]: row[1:] for row in tensors_of(facts, step)}
    assert named["model.bias"][:3] == ["bfloat16", [7], 14]
    assert named["model.layers.0.weight"] == ["float32", [10, 6], 240, "replicate=2:R shard=2:S0"]
    assert step["values"] == {"rank": 0}
    unfinished = next(s for s in facts["steps"] if s["place"] == "b/30")
    assert "1 ranks have written" in unfinished["why"] and "sweeps it" in unfinished["remedy"]


def test_what_steps_have_in_common_is_on_the_page_once(tmp_path: Path) -> None:
    many = state_of(hybrid((0, 1, 2, 3), 2), tensors=200)
    for step in range(1, 4):
        save(tmp_path, step, state=many)
    facts = browsed(tmp_path, tmp_path / "page.html")
    assert len(facts["rows"]) == 202
    assert len({json.dumps(step["shared"]) for step in facts["steps"]}) == 1
    assert facts["shared"][facts["steps"][0]["shared"]["tensors"]] == [[0, 202]]


def test_a_page_that_would_be_too_large_has_the_newest_steps_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, metadata={"text": str(step) * 3000})
    facts = Facts(open_storage(str(tmp_path)), limit=6000)
    for condition in examine(open_storage(str(tmp_path))):
        facts.add_step(condition)
    told = facts.to_json()
    newest, older = told["steps"]
    assert "shared" in newest and "shared" not in older
    assert (older["left_out"], older["state"]) == (True, "whole")
    assert "details of 1 older steps are left out" in told["notes"][0]


def test_verification_names_the_file_and_a_damaged_step_is_not_restorable(tmp_path: Path) -> None:
    save(tmp_path, 10)
    newest = save(tmp_path, 20)
    change_last_byte(newest)
    plain = browsed(tmp_path, tmp_path / "page.html")
    assert [step["state"] for step in plain["steps"]] == ["whole", "whole"]
    quick = browsed(tmp_path, tmp_path / "page.html", "--quick")
    assert quick["steps"][1]["verified"]["ok"] and quick["steps"][1]["verified"]["quick"]
    facts = browsed(tmp_path, tmp_path / "page.html", "--verify")
    bad, good = facts["steps"]
    assert (bad["state"], good["state"]) == ("damaged", "whole")
    assert next(newest.glob("data-*.safetensors")).name in bad["verified"]["problems"][0][0]
    assert bad["why"] and "repair" in bad["remedy"] and "shared" in bad
    assert good["verified"]["ok"] and facts["runs"][0]["restorable"] == 1


def numbers_state(values: np.ndarray[Any, Any]) -> State:
    """One float32 tensor of two shards."""
    mesh = Mesh(("shard",), (2,), (0, 1))

    def of(rank: int) -> tuple[list[Entry], dict[str, bytes]]:
        rule = MeshGeometry("w", values.shape, mesh, (Placement("shard", 0),))
        half = values[rank * len(values) // 2 : (rank + 1) * len(values) // 2]
        entry = Entry(("model", "w"), "float32", rule, ("model",), (), (rank,))
        return [entry], {entry.key: half.tobytes()}

    return of


def test_a_histogram_counts_every_finite_element_of_all_ranks_once(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    values[:5] = [np.nan, np.inf, -np.inf, 0, 0]
    for step in (1, 2):
        Group(tmp_path / str(step), (0, 1), state=numbers_state(values)).save(step=step)
    facts = browsed(tmp_path, tmp_path / "page.html", "--histograms", "w")
    newest, older = facts["steps"]
    assert "histograms" not in older
    (told,) = newest["histograms"].values()
    finite = values[np.isfinite(values)].astype(np.float64)
    counts, _ = np.histogram(finite, bins=32)
    assert told["counts"] == counts.tolist()
    assert (told["nonfinite"], told["zeros"]) == (3, 2)
    assert told["min"] == finite.min() and math.isclose(told["std"], finite.std())
    none = browsed(tmp_path, tmp_path / "page.html", "--histograms", "absent")
    assert none["steps"][0]["histograms"] == {}
    both = browsed(tmp_path, tmp_path / "page.html", "--histogram-steps", "2", "--histograms")
    assert all(step["histograms"] for step in both["steps"])


def test_a_tensor_that_does_not_fit_in_memory_is_read_twice(
    tmp_path: Path, monkeypatch: Any
) -> None:
    values = np.arange(5000, dtype=np.float32)
    Group(tmp_path, (0, 1), state=numbers_state(values)).save(step=1)
    monkeypatch.setattr("smckpt.cli.browse_facts.KEPT", 10_000)  # of 20,000 bytes
    facts = Facts(open_storage(str(tmp_path)), histograms="*")
    facts.add_step(*examine(open_storage(str(tmp_path))))
    (told,) = facts.steps[0]["histograms"].values()
    assert sum(told["counts"]) == 5000 and max(told["counts"]) - min(told["counts"]) <= 1


def test_a_histogram_of_damaged_data_says_so_and_the_page_is_made(tmp_path: Path) -> None:
    Group(tmp_path, (0, 1), state=numbers_state(np.ones(100, np.float32))).save(step=1)
    change_last_byte(tmp_path)
    facts = browsed(tmp_path, tmp_path.parent / "page.html", "--histograms")
    (told,) = facts["steps"][0]["histograms"].values()
    assert "checksum" in told["error"]


def test_a_page_that_verifies_and_counts_reads_each_byte_once(
    tmp_path: Path, monkeypatch: Any
) -> None:
    Group(tmp_path, (0, 1), state=numbers_state(np.ones(5 << 20, np.float32))).save(step=1)
    read, sums = list[int](), SavedFile.sums

    def counted(self: SavedFile, low: int, target: memoryview) -> Any:
        read.append(len(target))
        return sums(self, low, target)

    monkeypatch.setattr(SavedFile, "sums", counted)
    facts = browsed(tmp_path, tmp_path.parent / "page.html", "--verify", "--histograms")
    assert facts["steps"][0]["verified"]["ok"]
    (told,) = facts["steps"][0]["histograms"].values()
    assert sum(told["counts"]) == 5 << 20
    assert sum(read) == sum(path.stat().st_size for path in tmp_path.glob("data-*.safetensors"))


def test_the_page_of_a_root_in_s3_is_the_same(
    tmp_path: Path, s3_root: str, s3_server: Server
) -> None:
    step = save(tmp_path, 10)
    from smckpt.checkpoint.upkeep.transfer import copy_checkpoint

    copy_checkpoint(str(step), f"{s3_root}/run/10")
    facts = browsed(f"{s3_root}/run", tmp_path / "page.html", "--verify", "--histograms")
    local = browsed(tmp_path, tmp_path / "local.html")
    (there,), (here,) = facts["steps"], local["steps"]
    assert there["verified"]["ok"] and there["histograms"]
    assert tensors_of(facts, there) == tensors_of(local, here)
    assert (there["place"], there["attempts"]) == ("10", here["attempts"])


def test_a_root_without_checkpoints_and_a_page_that_cannot_be_written_are_refused(
    tmp_path: Path,
) -> None:
    assert "no checkpoint is here" in refused(tmp_path)
    assert "no such directory" in refused(tmp_path / "absent")
    save(tmp_path, 1)
    assert "--out" in refused(tmp_path, "--out", tmp_path / "absent" / "page.html")
    assert "goes with --histograms" in refused(tmp_path, "--histogram-steps", "2")
    page = tmp_path / "page.html"
    for _ in range(2):  # a page is replaced
        assert CliRunner().invoke(app, ["browse", str(tmp_path), "--out", str(page)]).exit_code == 0
    data = next(tmp_path.rglob("data-*.safetensors"))
    before = data.read_bytes()
    assert "no page is there already" in refused(tmp_path, "--out", data)
    assert data.read_bytes() == before


def test_a_directory_that_is_swapped_while_the_page_is_written_keeps_its_page(
    tmp_path: Path,
) -> None:
    """Each half of the write is in the directory that was there when it began."""
    save(tmp_path / "root", 1)
    calls, moment = 1 << 30, 0
    while moment < calls:
        top = tmp_path / str(moment)
        for name in ("out", "victim"):
            (top / name).mkdir(parents=True)
            (top / name / "page.html").write_text(f"<!doctype html>{name}")
        (top / "victim" / f"page.html.{os.getpid()}.tmp").write_text("theirs")

        def act(top: Path = top) -> None:
            write_page(str(top / "out" / "page.html"), b"new")

        def change(top: Path = top) -> None:
            swap(top / "out", top / "victim")

        with suppress(UsageError):
            calls = swapped_at(moment, act, change)
        left = {path.name: path.read_text() for path in (top / "victim").iterdir()}
        assert sorted(left.values()) == ["<!doctype html>victim", "theirs"], f"at call {moment}"
        aside = sorted(os.listdir(top / "out-aside")) if (top / "out-aside").exists() else None
        assert aside in (None, ["page.html"]), f"at call {moment}"
        moment += 1
    assert 2 < moment < 50


def test_the_command_runs_without_torch(tmp_path: Path) -> None:
    save(tmp_path, 1)
    page = tmp_path / "page.html"
    done = command("browse", tmp_path, "--out", page, "--verify", "--histograms")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{page}: 1 step, ")
    away = command("browse", tmp_path / "absent")
    assert (away.returncode, "no such directory" in away.stderr) == (2, True)


# -- telemetry ---------------------------------------------------------------------------------


def line(**fields: Any) -> str:
    usual = {
        "kind": "save", "time": 1000.0, "host": "node0", "directory": "/run/1", "step": 1,
        "queue": "q", "number": 0, "rank": 0, "outcome": "committed", "error": None,
        "blocked": 1.5, "waited": 1.0, "staged": 1.0, "written": 3.0, "committed": 4.0,
        "nbytes": 100, "alarms": [],
    }  # fmt: skip
    return json.dumps({**usual, **fields}) + "\n"


def test_a_save_of_several_ranks_is_one_event_and_a_repeated_one_is_the_next(
    tmp_path: Path,
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(
        line() + line(rank=1, time=1000.5) + line(time=2000.0)
        + line(rank=1, time=2000.0, outcome="failed", error="the disk is full", alarms=["NaN"])
        + "{cut\n" + line(time=float("inf")) + line(rank="0") + line(committed=-1)
    )  # fmt: skip
    told = read_timeline([str(file)], {"/run/1": 7}.get)
    assert told["unreadable"] == 4
    first, second = told["events"]
    assert (first["at"], first["of"], first["bytes"], first["error"]) == (7, 2, 200, None)
    # the call was 5 s before the line: 1 s of waiting, and 4 s from there
    assert first["ranks"][0] == [0, "node0", 995_000, 1.0, 1.5, 2.0, 4.0, 5.0, 100]
    assert (second["error"], second["alarms"]) == ("the disk is full", ["NaN"])


def test_a_long_telemetry_is_cut_to_the_newest_events_and_the_slowest_ranks(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    saves = [line(number=n, time=1000.0 + n) for n in range(EVENTS + 5)]
    ranks = [line(rank=r, committed=4.0 + r, time=9e5) for r in range(RANKS + 3)]
    file.write_text("".join(saves + ranks))
    told = read_timeline([str(file)], lambda _: None)
    assert (len(told["events"]), told["left"]) == (EVENTS, 6)
    last = told["events"][-1]
    assert (last["of"], len(last["ranks"])) == (RANKS + 3, RANKS)
    assert min(row[0] for row in last["ranks"]) == 3


def test_the_sinks_own_lines_belong_to_the_steps_they_name(tmp_path: Path) -> None:
    step = save(tmp_path, 10)
    file = tmp_path / "events.jsonl"
    file.write_text(line(directory=str(step), step=10) + line(directory=str(step / "tp1"), rank=1))
    facts = browsed(tmp_path, tmp_path / "page.html", "--telemetry", file)
    assert [event["at"] for event in facts["telemetry"]["events"]] == [0, 0]
    other = tmp_path / "other.txt"
    other.write_text("hello\n")
    assert "JsonLines" in refused(tmp_path, "--telemetry", other)


# -- what a checkpoint may contain -------------------------------------------------------------


FORGED = "</script><script>document.title='run'</script><img src=x onerror=alert(1)>\u202e\u2028&"


def test_no_text_of_a_checkpoint_is_markup_and_none_hides(tmp_path: Path) -> None:
    save(tmp_path, 1, metadata={FORGED: FORGED}, versions={FORGED: FORGED})
    browsed(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and not re.search(r"\u202e|(?<!\\)\\u202e", page)
    (step,) = facts_in(tmp_path / "page.html")["steps"]
    (key,) = step["metadata"]
    assert key.startswith("</script><script>") and "\\\\u202e" in json.dumps(key)


def test_numbers_that_a_browser_cannot_hold_are_text(tmp_path: Path) -> None:
    save(tmp_path, 1, metadata={"large": 1 << 60, "small": 3})
    (step,) = browsed(tmp_path, tmp_path / "page.html")["steps"]
    assert step["metadata"] == {"large": str(1 << 60), "small": 3}


def test_the_page_may_load_nothing_and_run_its_own_script_only() -> None:
    page = page_of({}).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\bsrc=|@import|url\(", page)


MALFORMED: dict[str, Callable[[Path], Any]] = {
    "a manifest of no JSON": lambda step: _only(step, "manifest-*").write_bytes(b"{"),
    "an empty manifest": lambda step: _only(step, "manifest-*").write_bytes(b""),
    "a table of a huge shape": lambda step: _reforged(step, lambda b: _row(b)["geometry"].update(
        shape=[1 << 62, 1 << 62])),
    "a path with a dict": lambda step: _reforged(step, lambda b: _row(b).update(path=["a", {}])),
    "a topology of words": lambda step: _reforged(step, lambda b: b.update(topology={"tp": "x"})),
    "metadata that is a list": lambda step: _reforged(step, lambda b: b.update(metadata=[1])),
    "a part that is a pipe": lambda step: _pipe(next(step.rglob("part-*"))),
    "a record that is a directory": lambda step: _directory(_only(step, "record-*")),
    "a link in a circle": lambda step: _circle(_only(step, "manifest-*")),
}  # fmt: skip


def _only(step: Path, pattern: str) -> Path:
    return sorted(step.rglob(pattern))[0]


def _row(body: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = body["layout"]["rows"][1]
    return row


def _reforged(step: Path, change: Change) -> None:
    reforge(_only(step, "manifest-*"), change)
    seal_record(step)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_step_costs_itself_beside_good_ones(tmp_path: Path, what: str) -> None:
    """The others are on the page as they are without it."""
    for step in (10, 30):
        save(tmp_path / "run", step)
    before = browsed(tmp_path / "run", tmp_path / "before.html")
    odd_one = Step(
        tmp_path / "run" / "40", {"part0": (0, 2), "part1": (1, 3)},
        state_of(hybrid((0, 1, 2, 3), 2)),
    )  # fmt: skip
    odd_one.save(step=40)
    MALFORMED[what](tmp_path / "run" / "40")
    facts = browsed(tmp_path / "run", tmp_path / "page.html")
    steps = {one["place"]: one for one in facts["steps"]}
    assert {"10", "30"} <= {place.rpartition("/")[2] for place in steps}
    for one in before["steps"]:
        again = steps[one["place"]]
        assert (again["state"], again["step"]) == ("whole", one["step"])
        assert tensors_of(facts, again) == tensors_of(before, one)
    odd = [one for place, one in steps.items() if place.rpartition("/")[2].startswith("40")]
    verified = what == "a table of a huge shape"  # what only a reader of data sees
    assert verified or all(one["state"] != "whole" for one in odd), odd
    run = next(run for run in facts["runs"] if run["name"] == before["runs"][0]["name"])
    assert verified or facts["steps"][run["restorable"]]["place"] == "30"

"""The `smckpt` command, run as a user runs it, on checkpoints that real ranks saved."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smckpt
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.models import shards

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path, status: int = 0, **environment: str) -> str:
    """stdout of the command, or stderr where it must fail."""
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status == 2 else done.stdout


def data(*arguments: str | Path, status: int = 0) -> Any:
    """What the command prints with --json."""
    return json.loads(run(*arguments, "--json", status=status))


def save_hybrid(root: str) -> None:
    """Two groups of two replicas, as SMP's scripts do it: one directory for each shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    state = smckpt.ParallelState.from_device_mesh(mesh)
    for ranks in state.ranker.get_rep_groups():
        group = dist.new_group(ranks)
        if state.rank in ranks:
            mine = group
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        taken = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "note": "hi"}
    smckpt.save(
        taken,
        checkpoint_id=f"{root}/step-30/fsdp{state.fsdp_rank}",
        process_group=mine,
        options=smckpt.SaveOptions(parallel_state=state, metadata={"run": "a"}),
        step=30,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """step-30, LOCAL by two groups; step-7, of one; and things that are no checkpoints."""
    root = tmp_path_factory.mktemp("checkpoints")
    run_ranks(save_hybrid, 4, str(root))
    weights = {f"layer{i}.weight": torch.randn(64, 48) for i in range(30)}
    shards.write(root / "step-7", 2, lambda rank: shards.fsdp2(weights, rank, 2), step=7)
    (root / "logs" / "today").mkdir(parents=True)
    (root / "logs" / "manifest-1.json").write_text("{}")
    shutil.copytree(root / "step-7", root / "unfinished")
    next((root / "unfinished").glob("manifest-*")).unlink()
    return root


@pytest.fixture
def step7(root: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(root / "step-7", tmp_path / "step-7")


# -- ls -----------------------------------------------------------------------------------------


def test_ls_lists_committed_checkpoints_newest_first_and_below_them_what_is_none(root):
    where, *lines = run("ls", root).splitlines()
    assert where == f"in {root}:"
    assert lines[0].split() == ["checkpoint", "step", "kind", "size", "groups", "committed"]
    assert [line.split()[:3] for line in lines[2:-1]] == [
        ["step-30", "30", "LOCAL"],
        ["step-7", "7", "LOCAL"],
    ]
    assert lines[-1] == f"unfinished: unfinished, 368.0 KiB: `smckpt doctor {root}` says more"
    assert run("ls", root / "step-7").splitlines()[3].split()[0] == "."


def test_ls_json_has_every_field(root):
    newest, older = data("ls", root)
    assert (newest["step"], newest["kind"]) == (30, "LOCAL")
    assert sorted(newest["groups"]) == ["fsdp0", "fsdp1"]
    assert older["nbytes"] == sum(file.stat().st_size for file in shards.files(root / "step-7"))


def test_ls_of_an_empty_directory_says_so_and_of_a_missing_one_fails(tmp_path):
    assert "no committed checkpoint" in run("ls", tmp_path)
    assert data("ls", tmp_path) == []
    assert "no such directory" in run("ls", tmp_path / "absent", status=2)
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links form a loop" in run("ls", tmp_path / "loop", status=2)


# -- show ---------------------------------------------------------------------------------------


def test_show_tells_topology_tensors_sizes_writers_and_metadata(root):
    facts = data("show", root / "step-30")
    assert facts["topology"]["hybrid_shard_degree"] == 2
    assert facts["topology"]["replication_degree"] == 2
    assert (facts["step"], facts["kind"], facts["metadata"]) == (30, "LOCAL", {"run": "a"})
    assert sorted(facts["groups"]) == [[0, 2], [1, 3]]
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["objects"]["values"]["note"] == "hi"
    assert [writer["rank"] for writer in facts["writers"]] == [0, 1, 2, 3]
    assert {writer["host"] for writer in facts["writers"]} == {socket.gethostname()}
    assert {writer["directory"] for writer in facts["writers"]} == {"fsdp0", "fsdp1"}
    for writer in facts["writers"]:
        for file in writer["files"]:
            path = root / "step-30" / writer["directory"] / file["name"]
            assert path.stat().st_size == file["bytes"]
    tensors = {tensor["name"]: tensor for tensor in facts["tensors"]}
    weight = tensors["model.1.weight"]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [4, 8], 128)
    assert weight["held"] == "dp_replicate=2:R dp_shard=2:S0"


def test_show_prints_a_managers_record_and_metrics_by_their_names(tmp_path):
    record = {"run": "a1", "claim": {"generation": 3}, "degrees": None, "memory": "", "failures": 0}
    metadata = {"note": "hi", "metrics": {"loss": 0.25}, "manager": record}
    options = smckpt.SaveOptions(metadata=metadata)
    smckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", options=options)
    rows = [" ".join(line.split()) for line in run("show", tmp_path / "a").splitlines()]
    assert "metadata note=hi" in rows and "metrics loss=0.25" in rows
    assert "manager run=a1 claim={generation: 3} failures=0" in rows
    assert data("show", tmp_path / "a")["metadata"] == metadata


def test_show_prints_the_same_as_tables(root):
    text = run("show", root / "step-30")
    host = data("show", root / "step-30")["writers"][0]["host"]
    for word in ("LOCAL", "{0,2} {1,3}", "run=a", "4 × 8", host, "fsdp1"):
        assert word in text
    assert re.search(r"hybrid_shard_degree +2$", text, re.MULTILINE)
    assert re.search(r"^note +hi$", text, re.MULTILINE)


def test_show_counts_tensors_on_request_over_all_shards(root, tmp_path):
    (weight,) = data("show", root / "step-30", "--tensors", "model.1.weight")["tensors"]
    assert "statistics" not in weight
    (weight,) = data("show", root / "step-30", "--tensors", "model.1.weight", "--stats")["tensors"]
    smckpt.export_hf(root / "step-30", tmp_path / "out")
    values = load_file(tmp_path / "out" / "model.safetensors")["1.weight"].double()
    expected = {"min": values.min(), "max": values.max(), "mean": values.mean()}
    expected |= {"std": values.std(correction=0), "nonfinite": 0}
    assert weight["statistics"] == pytest.approx({k: float(v) for k, v in expected.items()})
    assert "nonfinite" in run("show", root / "step-30", "--stats")


ODD = {
    "name": "red \x1b[31m",
    "batch": (1, 2),
    "more": {"rate": 0.5, "none": None},
    "infinite": float("inf"),
    "seen": b"1234",
    "half": torch.tensor([1.0, float("nan"), -3.0], dtype=torch.bfloat16),
    "code": torch.tensor([1j]),
    "step": 12,
}


def test_show_prints_values_of_every_kind_and_nothing_that_a_terminal_obeys(tmp_path):
    run_ranks(shards_of_odd, 1, str(tmp_path / "odd"))
    text = run("show", tmp_path / "odd", "--stats")
    for line in (
        r"name +red \\x1b\[31m",
        r"batch +\(1, 2\)",
        r"more +\{rate: 0\.5, none: null\}",
        r"infinite +inf",
        r"seen +bytes, 6 B",
        r"half .* -3 +1 +-1 +2 +1 +by its rank",
        r"code .* - +- +- +- +- +by its rank",
        r"  step +12",  # recorded, since no step= was given
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), (line, text)
    assert "\x1b" not in text


def shards_of_odd(place: str) -> None:
    smckpt.save(ODD, checkpoint_id=place)


def test_show_cuts_a_long_table_and_says_how_to_see_all(root):
    text = run("show", root / "step-7")
    assert "30 tensors" in text
    assert "… and 10 more: --tensors '*' lists all" in text
    assert (
        len([line for line in run("show", root / "step-7").splitlines() if "layer" in line]) == 20
    )
    text = run("show", root / "step-7", "--tensors", "*")
    assert len([line for line in text.splitlines() if "layer" in line]) == 30


def test_show_picks_tensors_by_glob_or_part_of_the_name(root):
    facts = data("show", root / "step-7", "--tensors", "model.layer1?.weight")
    assert [tensor["name"] for tensor in facts["tensors"]] == [
        f"model.layer{i}.weight" for i in range(10, 20)
    ]
    facts = data("show", root / "step-7", "--tensors", "layer29")
    assert len(facts["tensors"]) == 1
    assert "0 tensors that match 'bias'" in run("show", root / "step-7", "--tensors", "bias")


def test_a_piped_table_is_never_cut(root, tmp_path):
    deep = tmp_path / ("long" * 40)
    shutil.copytree(root / "step-7", deep / "step-7")
    assert f"{deep.name}/step-7" in run("ls", tmp_path, COLUMNS="40")


# -- verify -------------------------------------------------------------------------------------


def test_verify_of_a_good_checkpoint_ends_with_status_0(root):
    assert "ok" in run("verify", root / "step-30")
    assert data("verify", root / "step-7", "--threads", "2")["problems"] == []


def test_verify_names_file_and_offset_of_a_changed_byte_and_ends_with_status_1(step7):
    victim = shards.files(step7)[1]
    shards.flip(victim, 5000)
    text = run("verify", step7, status=1)
    assert victim.name in text
    assert len(data("verify", step7, status=1)["problems"]) == 1


def test_verify_lists_every_problem(step7):
    first, second = shards.files(step7)
    first.unlink()
    shards.flip(second, 6000)
    text = run("verify", step7, status=1)
    assert first.name in text
    assert second.name in text


def test_verify_quick_sees_a_short_file_without_its_data(step7):
    assert "ok (names, sizes and the blocks of headers; no other data)" in run(
        "verify", "--quick", step7
    )
    victim = shards.files(step7)[1]
    os.truncate(victim, victim.stat().st_size - 1)
    text = run("verify", "--quick", step7, status=1)
    assert victim.name in text and "1 problem (names, sizes" in text


def test_verify_shows_a_bar_on_a_terminal(root):
    parent, child = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "smckpt.cli", "verify", str(root / "step-7")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=child,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:  # EIO: the command closed its terminal
        shown += b""
    assert done.wait(seconds(60)) == 0
    assert b"verifying" in shown


# -- export -------------------------------------------------------------------------------------


def test_export_writes_the_model_where_it_is_told(root, tmp_path):
    out = tmp_path / "exported"
    facts = data("export", root / "step-30", out)
    assert (facts["tensors"], facts["files"]) == (4, ["model.safetensors"])
    weights = load_file(out / "model.safetensors")
    assert {name: list(w.shape) for name, w in weights.items()} == {
        "0.weight": [8, 8],
        "0.bias": [8],
        "1.weight": [4, 8],
        "1.bias": [4],
    }
    refused = run("export", root / "step-30", out, status=2)
    assert "is not empty" in refused
    assert "pass --overwrite to replace" in refused  # as it is typed
    assert "4 tensors" in run("export", root / "step-30", out, "--overwrite", "--dtype", "bf16")
    assert load_file(out / "model.safetensors")["0.bias"].dtype is torch.bfloat16


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_no_checkpoint_is_one_clear_line_and_status_2(root, command):
    for path in (root / "logs", root / "unfinished", root / "absent"):
        text = run(command, path, status=2)
        assert text.startswith("smckpt: ")
        assert len(text.splitlines()) == 1
        assert str(path) in text


def test_a_manifest_of_a_newer_format_is_refused_in_one_line(step7):
    from smckpt.checkpoint.records.sealed import open_json, seal_json

    (manifest,) = step7.glob("manifest-*")
    body = open_json(manifest.read_bytes(), str(manifest))
    manifest.write_bytes(seal_json({**body, "format": [9, 0]}))
    text = run("show", step7, status=2)
    assert "newer smckpt" in text
    assert len(text.splitlines()) == 1


def test_a_store_that_is_not_built_is_refused(root):
    assert "s3://" in run("ls", "s3://bucket/prefix", status=2)


def test_help_is_given_for_h_too():
    assert "--overwrite" in run("export", "-h")


def test_ls_names_what_is_of_another_format(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    text = run("ls", tmp_path)
    assert "torch.distributed.checkpoint (DCP)" in text and "smckpt convert" in text


def test_a_directory_that_cannot_be_read_is_told_once(root, tmp_path):
    shutil.copytree(root / "step-7", tmp_path / "step-7")
    (tmp_path / "bad").symlink_to("bad")
    os.mkdir(tmp_path / "closed", 0o000)
    done = subprocess.run(
        [sys.executable, "-c", LS_AS_OTHERS_WOULD, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(60),
    )  # fmt: skip
    assert "step-7" in done.stdout, done.stderr
    assert done.stderr.count("skipped") == 1


# root may look into any directory; others may not
LS_AS_OTHERS_WOULD = """
import os, sys
scandir = os.scandir
def closed(path):
    if str(path).endswith("closed"):
        raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)
os.scandir = closed
sys.argv = ["smckpt", "ls", sys.argv[1]]
from smckpt.cli import main
main()
"""


def test_a_wrong_option_is_status_2():
    assert "No such option" in run("ls", "--colour", status=2)
    assert "Missing argument" in run("show", status=2)


def test_a_reader_that_goes_away_gets_no_traceback(root):
    command = f"{sys.executable} -m smckpt show {root}/step-7 --json | head -1"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=seconds(60)
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_an_output_that_is_full_or_closed_gets_no_traceback(root):
    for output, status, said in ((">/dev/full", 2, "cannot print"), (">&-", 0, "")):
        command = f"{sys.executable} -m smckpt ls {root} {output}"
        done = subprocess.run(
            command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=seconds(60)
        )
        assert (done.returncode, said in done.stderr) == (status, True)
        assert len(done.stderr.splitlines()) == bool(said)


def test_an_ascii_terminal_gets_no_traceback(root):
    assert "step-7" in run("show", root / "step-7", PYTHONIOENCODING="ascii")


# -- start --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_looking_needs_no_torch(root, command):
    place = root if command == "ls" else root / "step-7"
    code = (
        "import sys\nsys.modules['torch'] = None  # an import would raise\n"
        f"sys.argv = ['smckpt', {command!r}, {str(place)!r}]\n"
        "from smckpt.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=seconds(60)
    )
    assert done.returncode == 0, done.stderr


def test_ls_imports_nothing_that_takes_long(root):
    """The promise is 0.3 s. What is slow to import takes longer by itself."""
    code = (
        f"import sys\nsys.argv = ['smckpt', 'ls', {str(root)!r}]\n"
        "from smckpt.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "slow = {'torch', 'numpy', 'boto3', 'botocore', 'fsspec', 'transformers', 'safetensors'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=seconds(60)
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_printed():
    assert run("--version").strip() == smckpt.__version__

"""Saves to a real S3 server: whole or not at all, whoever dies or races."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt.engine.background.commands import Probe
from smckpt.engine.background.worker_client import Worker
from smckpt.storage import access_to, open_storage
from smckpt.storage.budget import Share
from smckpt.storage.s3.config import StoreOptions
from tests.support import warm
from tests.support.faults.proxy import faulty_proxy, secure_proxy
from tests.support.heard import heard_shares
from tests.support.launch import ROOT, run_ranks
from tests.support.limits import seconds
from tests.support.s3 import Server

BIG = 3 << 20  # float32: 12 MiB, three parts of 5 MiB


def state(value: float, size: int = 1000) -> dict[str, object]:
    return {"a": torch.full((size,), value), "rank": dist.get_rank(), "step": int(value)}


def saved_and_loaded(root: str) -> list[tuple[set[float], int, str]]:
    """Two steps."""
    told = []
    for step in (1, 2):
        where = f"{root}/step{step}"
        config = {"chunk_size_MB": 5}
        smckpt.save(state(float(step), BIG), checkpoint_id=where, step=step, storage=config)
        target = state(0.0, BIG)
        smckpt.load(target, checkpoint_id=where, storage=config)
        found = smckpt.latest_checkpoint(root)
        assert found is not None
        assert target["rank"] == dist.get_rank()
        told.append((set(target["a"].unique().tolist()), target["step"], found.path))  # type: ignore[attr-defined]
    return told  # type: ignore[return-value]


def test_two_ranks_save_to_s3_in_parts_and_load_what_they_saved(s3_root: str) -> None:
    for told in run_ranks(saved_and_loaded, 2, s3_root):
        assert told == [({float(step)}, step, f"{s3_root}/step{step}") for step in (1, 2)]
    for step in (1, 2):
        report = smckpt.verify_checkpoint(f"{s3_root}/step{step}")
        assert report.ok
        assert report.nbytes > 4 * BIG


def shares_of_a_save(root: str) -> dict[str, Share]:
    heard = heard_shares()
    smckpt.save(state(1.0), checkpoint_id=root)
    return heard


def test_ranks_write_at_their_share_of_the_budget_and_coordinators_publish_at_theirs(
    s3_root: str,
) -> None:
    for rank, heard in enumerate(run_ranks(shares_of_a_save, 2, s3_root)):
        assert heard["write_part"] == Share.of_rank(rank, 2)
        if rank == 0:
            assert heard["publish_manifest"] == Share.of_coordinator(0, 1)


def test_the_worker_keeps_to_the_share_that_comes_with_a_request(s3_root: str) -> None:
    worker = Worker()
    config = StoreOptions.from_mapping({"write_rate": 10}, StoreOptions.from_environment())
    try:
        access = access_to(s3_root, storage=config).holding(Share(writes=0.1))
        look = Probe(s3_root, "0123456789ab", create=False)
        worker.call(look, timeout=seconds(60), access=access)  # it has a client now
        began = time.monotonic()
        look = Probe(s3_root, "0123456789ab", create=True, leave=False)
        worker.call(look, timeout=seconds(60), access=access)  # three writes, one a second
        assert time.monotonic() - began >= 2
    finally:
        worker.close()


def refused(root: str, endpoint: str) -> tuple[str, str]:
    config = {"endpoint": endpoint, "retries": 1}
    said = []
    for size in (1000, BIG):
        try:
            smckpt.save(state(1.0, size), checkpoint_id=root, storage=config)
        except smckpt.SaveFailedError as error:
            said.append(str(error))
    return said[0], said[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_ignores_conditions_is_refused_on_every_rank_before_data_is_sent(
    s3_root: str, s3_server: Server, ranks: int
) -> None:
    with faulty_proxy(s3_server.endpoint) as proxy:
        proxy.spoil("PUT", "unconditional", 1000)
        for said in run_ranks(refused, ranks, s3_root, proxy.endpoint):
            assert all("ignores If-None-Match" in text for text in said), said
        sent = [line for line in proxy.seen if line.startswith(("PUT", "POST"))]
    assert sent
    assert all("/probe-" in line for line in sent), "only what is small"
    assert open_storage(s3_root).list() == []


def overwritten(where: str) -> tuple[float, int]:
    for value in (1.0, 2.0, 3.0):
        smckpt.save(state(value), checkpoint_id=where)
    target = state(0.0)
    smckpt.load(target, checkpoint_id=where)
    return target["a"][0].item(), target["step"]  # type: ignore[index, return-value]


def test_the_last_save_under_one_id_is_the_one_that_is_loaded_and_the_others_are_swept(
    s3_root: str,
) -> None:
    assert run_ranks(overwritten, 2, s3_root) == [(3.0, 3), (3.0, 3)]
    names = [info.name for info in open_storage(s3_root).list()]
    assert len([name for name in names if name.startswith("manifest-")]) == 1, names


SAVER = """
import sys, torch, torch.distributed as dist, smckpt
dist.init_process_group("gloo")
first, count, size = (int(a) for a in sys.argv[2:5])
for step in range(first, first + count):
    state = {"a": torch.full((size,), float(step)), "step": step}
    smckpt.save(
        state, checkpoint_id=sys.argv[1], storage={"chunk_size_MB": 5},
        options=smckpt.SaveOptions(sweep=False),
    )
    print(step, flush=True)
"""


def saver(where: str, first: int, count: int, size: int) -> warm.Piped:
    from tests.support.launch import free_port

    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVER, where, str(first), str(count), str(size)]
    return warm.Piped(command, env={**os.environ, **environment})


def load_here(where: str, size: int) -> tuple[set[float], int]:
    target = {"a": torch.zeros(size), "step": 0}
    smckpt.load(target, checkpoint_id=where)
    return set(target["a"].unique().tolist()), target["step"]  # type: ignore[attr-defined, return-value]


def test_of_two_racing_writers_a_reader_finds_one_whole_checkpoint(s3_root: str) -> None:
    children = [saver(s3_root, first, 5, 1000) for first in (1, 101)]
    ends = []
    for child in children:
        out, err = child.communicate(timeout=seconds(120))
        ends.append((child.returncode, out.split(), err[-2000:]))
    # The later session fences the earlier one off; at least one goes through to its end.
    assert any(code == 0 for code, _, _ in ends), ends
    [(values, step)] = run_ranks(load_here, 1, s3_root, 1000)
    assert values == {float(step)}
    winners = [int(steps[-1]) for code, steps, _ in ends if code == 0]
    assert step in winners


@pytest.mark.parametrize("after_parts", [1, 2])
def test_a_trainer_killed_in_mid_save_leaves_the_old_checkpoint_whole(
    s3_root: str, after_parts: int, tmp_path: Path
) -> None:
    child = saver(s3_root, 1, 1000, BIG)
    try:
        last = int(child.stdout.readline())  # committed
        _until_uploading(s3_root, after_parts)
    finally:
        child.kill()
        rest, _ = child.communicate(timeout=seconds(30))
    last = int((rest.split() or [last])[-1])
    [(values, step)] = run_ranks(load_here, 1, s3_root, BIG)
    assert values == {float(step)}
    assert step in (last, last + 1)  # the commit may have come before the word of it


def _until_uploading(where: str, parts: int) -> None:
    """Until an unfinished upload below `where` has so many parts."""
    import boto3

    from tests.support.s3 import BUCKET

    client = boto3.client("s3", endpoint_url=os.environ["SMCKPT_S3_ENDPOINT"], region_name="x")
    prefix = where.partition(f"{BUCKET}/")[2]
    deadline = time.monotonic() + seconds(60)
    while time.monotonic() < deadline:
        for upload in client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get(
            "Uploads", ()
        ):
            try:
                answer = client.list_parts(
                    Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
                )
            except client.exceptions.ClientError:
                continue  # finished meanwhile
            if len(answer.get("Parts", ())) >= parts:
                return
    raise AssertionError("no upload was seen under way")


def saved(root: str) -> None:
    model = {"model": {"weight": torch.arange(12.0).reshape(3, 4)}}
    smckpt.save(model, checkpoint_id=f"{root}/run", step=7)
    there = {"model": {"weight": torch.zeros(3, 4)}}
    smckpt.load(there, checkpoint_id=f"{root}/run")
    assert torch.equal(there["model"]["weight"], model["model"]["weight"])


@pytest.fixture
def over_tls(
    s3_root: str, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """All of this process and its children."""
    with secure_proxy(s3_server.endpoint, tmp_path / "ca.pem") as proxy:
        monkeypatch.setenv("SMCKPT_S3_ENDPOINT", proxy.endpoint)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        yield
        assert len(proxy.seen) > 30


def test_a_checkpoint_is_saved_loaded_looked_at_and_exported_over_tls(
    s3_root: str, over_tls: None, tmp_path: Path
) -> None:
    import json

    from click.testing import CliRunner
    from safetensors.torch import load_file

    from smckpt.cli.app import app

    run_ranks(saved, 1, s3_root)
    [listed] = json.loads(CliRunner().invoke(app, ["ls", "--json", s3_root]).output)
    assert (listed["path"], listed["step"]) == (f"{s3_root}/run", 7)
    shown = CliRunner().invoke(app, ["show", f"{s3_root}/run"])
    assert shown.exit_code == 0
    assert "weight" in shown.output
    verified = CliRunner().invoke(app, ["verify", f"{s3_root}/run"])
    assert (verified.exit_code, verified.output[:3]) == (0, "ok:")
    smckpt.export_hf(f"{s3_root}/run", str(tmp_path / "out"))
    [file] = (tmp_path / "out").glob("*.safetensors")
    assert load_file(file)["weight"].flatten().tolist() == list(range(12))


def two_layers(root: str) -> None:
    torch.manual_seed(1)
    model = {"model": {f"layers.{i}.weight": torch.randn(1024, 1024) for i in range(4)}}
    smckpt.save(model, checkpoint_id=root)


class Tokenizer:
    def save_pretrained(self, directory: str) -> None:
        Path(directory, "tokenizer.json").write_text("{}")


def test_an_export_to_s3_streams_its_files_and_puts_the_index_last(
    s3_root: str, tmp_path: Path
) -> None:
    run_ranks(two_layers, 1, str(tmp_path / "run"))
    local = smckpt.export_hf(
        tmp_path / "run", tmp_path / "out", options=smckpt.ExportOptions(max_shard_size="9MiB")
    )
    store = open_storage(f"{s3_root}/out")
    done: list[str] = []  # objects, as they appear

    def note(params: dict[str, object], **_: object) -> None:
        done.append(str(params["Key"]).rpartition("/")[2])

    config = smckpt.StoreOptions.from_mapping(
        {"chunk_size_MB": 5}, smckpt.StoreOptions.from_environment()
    )
    # the client that the export will have, too
    opened = open_storage(s3_root, storage=config)
    client = opened.run("look", s3_root, lambda c: c)  # type: ignore[attr-defined]
    for operation in ("CompleteMultipartUpload", "PutObject"):
        client.meta.events.register(f"provide-client-params.s3.{operation}", note)
    try:
        report = smckpt.export_hf(
            tmp_path / "run",
            store.url,
            options=smckpt.ExportOptions(max_shard_size="9MiB"),
            tokenizer=Tokenizer(),
            storage=config,
        )
    finally:
        for operation in ("CompleteMultipartUpload", "PutObject"):
            client.meta.events.unregister(f"provide-client-params.s3.{operation}", note)
    assert report.files == local.files
    assert len(report.files) == 2
    assert (done[0], done[-1]) == ("tokenizer.json", "model.safetensors.index.json")
    # threads finish them in any order
    assert sorted(done[1:-1]) == sorted([*report.files, "README.md"])
    for name in (*report.files, done[-1]):
        assert store.read(name) == (tmp_path / "out" / name).read_bytes()
    with pytest.raises(smckpt.UsageError, match="not empty"):
        smckpt.export_hf(tmp_path / "run", store.url)
    again = smckpt.export_hf(
        tmp_path / "run", store.url, options=smckpt.ExportOptions(overwrite=True)
    )
    assert {i.name for i in store.list()} == {"tokenizer.json", "README.md", *again.files}
    assert len(again.files) == 1


def test_options_for_s3_are_refused_for_a_disk_and_unknown_ones_by_name(tmp_path: Path) -> None:
    from smckpt.storage.s3.config import s3_options

    with pytest.raises(smckpt.UsageError, match="is not in S3"):
        s3_options(str(tmp_path), {"region": "eu-west-1"})
    with pytest.raises(smckpt.UsageError, match="colour"):
        s3_options("s3://b/k", {"colour": 1})
    with pytest.raises(smckpt.UsageError, match="storage='eu-west-1' is a str"):
        s3_options("s3://b/k", "eu-west-1")  # type: ignore[arg-type]


def test_the_two_arguments_of_smp_make_one_value() -> None:
    from smckpt.integrations.sagemaker.distributed.checkpoint.s3_filesystem import store_options

    assert store_options(None, None) is None
    with pytest.raises(smckpt.UsageError, match="give one of the two"):
        store_options("a", smckpt.StoreOptions(region="b"))
    with pytest.raises(smckpt.UsageError, match="give one of the two"):
        store_options("a", {"region": "b"})
    assert store_options("a", {"retries": 1}) == {"retries": 1, "region": "a"}
    # a whole value replaces the environment's, as in `storage=`
    assert store_options("a", smckpt.StoreOptions(retries=1)) == smckpt.StoreOptions("a", retries=1)

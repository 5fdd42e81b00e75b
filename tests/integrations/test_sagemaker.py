"""The door to Amazon SMP: the code of its documentation runs, on 8 ranks."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smckpt
from smckpt.integrations import sagemaker
from smckpt.integrations.sagemaker.checkpoint import utils
from smckpt.integrations.sagemaker.distributed.checkpoint import (
    s3_filesystem,
    state_dict_saver,
    state_dict_utils,
)
from smckpt.run import provide
from tests.support.frameworks import smp_document as document
from tests.support.launch import ROOT, run_ranks
from tests.support.models import references as ref
from tests.support.s3 import BUCKET, Server

WORLD = 8
Trained = tuple[Any, Any]


class Job:
    """What the cases of one rank work with: TP 2 × shard 2 × replicas 2."""

    def __init__(self, folder: str, degrees: dict[str, int]) -> None:
        import torch.sagemaker as tsm

        tsm.init(degrees)
        self.state = tsm.state
        self.folder = Path(folder)
        self.start, self.config = torch.load(self.folder / "llama.pt")

    def build(self, seed: int) -> Trained:
        """The tensor-parallel example in FSDP1, in the place of `tsm.transform(model)`."""
        sys.path.insert(0, str(ROOT / "examples"))
        from tensor_parallel import ParallelLlama

        state = self.state
        net = ParallelLlama(self.config, 128, state.tp_process_group)
        cut = ref.te(self.start, state.tp_size, state.tp_rank)
        net.load_state_dict({n: t + seed for n, t in cut.items() if not n.endswith("_extra_state")})
        model = FSDP(
            net,
            process_group=(state.fsdp_process_group, state.rep_process_group),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({type(net.model.layers[0])}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def train(self, trained: Trained) -> None:
        """One step; ranks of a tensor-parallel group read the same."""
        model, optimizer = trained
        tokens = torch.arange(16).view(2, 8) * 3 % 120 + self.state.dp_rank
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def held(trained: Trained) -> dict[str, Any]:
    """What this rank holds, copied."""
    model, optimizer = trained
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        tensors, groups = model.state_dict(), optimizer.state_dict()
    flat = {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}
    for fqn, slots in groups["state"].items():
        flat |= {f"{fqn}.{slot}": value.clone() for slot, value in slots.items()}
    return flat


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    names = {n for n in a.keys() & b.keys() if not torch.equal(a[n], b[n])}
    return sorted(names | (a.keys() ^ b.keys()))


def saved_and_resumed(job: Job, save: Any, load: Any) -> dict[str, list[str]]:
    """Two saves under one id with a step between and after; then a new model, and a step of both.
    What differs."""
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import maybe_finalize_async_calls

    trained = job.build(0)
    for _ in range(2):
        job.train(trained)
        save(*trained)
    expected = held(trained)
    job.train(trained)  # while the save is under way
    maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    other = job.build(1)
    load(*other)
    resumed = different(held(other), expected)
    job.train(other)
    return {"resumed": resumed, "a step later": different(held(other), held(trained))}


# -- the cases: run on all ranks, in one order -----------------------------------------------------


def local(job: Job) -> Any:
    folder = str(job.folder / "local")
    return saved_and_resumed(
        job,
        lambda *trained: document.save_local(*trained, folder),
        lambda *trained: document.load_local(*trained, folder),
    )


def in_s3(job: Job) -> Any:
    """The snippet; then live tensors are spoilt and loaded once more."""
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load

    trained = job.build(0)
    job.train(trained)
    expected = held(trained)
    state_dict, kw = document.save_local(*trained, str(job.folder / "before-s3"))
    sub_dir = f"tp{job.state.tp_rank}_ep{job.state.ep_rank}_fsdp{trained[0].rank}"
    document.save_and_load_in_s3(state_dict, sub_dir, "smp/checkpoints", BUCKET, kw)
    for tensor in state_dict["model"].values():
        tensor.fill_(7)
    load(state_dict, checkpoint_id=f"s3://{BUCKET}/smp/checkpoints/{sub_dir}", **kw)
    return different(held(trained), expected)


def sharded(job: Job) -> Any:
    folder = str(job.folder / "sharded")
    return saved_and_resumed(
        job,
        lambda *trained: document.save_sharded(*trained, folder),
        lambda *trained: document.load_sharded(*trained, folder),
    )


def full(job: Job) -> Any:
    """As the page has it, and without translation."""
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType

    model, _ = job.build(0)
    document.save_full(model, str(job.folder / "full"), Config(job.config))
    kept = FullStateDictConfig(rank0_only=True, translate_on_save=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, kept):
        names = sorted(model.state_dict())
    return [name for name in names if "layernorm_qkv" in name][:1]


class Config:
    """What the snippet calls of Hugging Face's config; transformers is not imported by 8 ranks."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text(json.dumps(self._values))


def hooks(job: Job) -> Any:
    """The calls of a trainer that notes, beside each group's checkpoint, which step it is."""
    import torch.sagemaker.distributed.checkpoint.state_dict_saver as saver
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
    from torch.sagemaker.distributed.checkpoint.filesystem import (
        DistributedFileSystemWriter,
        path_to_file_system,
    )

    heard: list[str] = []

    def note(writer: Any) -> None:
        heard.append("after")
        if writer.is_coordinator:
            path = writer.fs.concat_path(writer.path, ".local.metadata")
            with writer.fs.create_stream(path, "wb") as stream:
                torch.save({"step": 3}, stream)

    state, queue, out = job.state, AsyncCallsQueue(), []
    group = state.rep_process_group
    for root in (str(job.folder / "hooks"), f"s3://{BUCKET}/smp/hooks"):
        where = f"{root}/tp{state.tp_rank}_fsdp{state.fsdp_rank}"
        writer = DistributedFileSystemWriter(
            where, pre_write_hooks=[lambda _: heard.append("before")], post_write_hooks=[note]
        )
        saver.async_save(
            {"a": torch.ones(4)},
            storage_writer=writer,
            process_group=group,
            coordinator_rank=min(dist.get_process_group_ranks(group)),
            queue=queue,
            force_check_all_plans=False,
            wait_error_handling=False,
        )
        queue.maybe_finalize_async_calls(blocking=True, skip_sync=True)
        dist.barrier()
        fs = path_to_file_system(Path(where))
        with fs.create_stream(fs.concat_path(Path(where), ".local.metadata"), "rb") as stream:
            out.append(torch.load(stream))
    names = fs.fs.listdir(Path(root), detail=False)
    broken = DistributedFileSystemWriter(
        str(job.folder / "hooks-broken"), post_write_hooks=[lambda _: 1 / 0]
    )
    try:
        saver.save({"a": torch.ones(4)}, storage_writer=broken)
    except ZeroDivisionError:
        heard.append("raised")
    return {"heard": heard, "read": out, "names": [n for n in names if "/tp" in n]}


def resharded(job: Job) -> Any:
    """Saved at shard degree 2 with two replicas, loaded at 4: as the page says of SHARDED."""
    before = job.build(0)
    for _ in range(2):
        job.train(before)  # as `sharded` did before its last save
    expected = gathered(before)
    job.state.reset()
    other = Job(str(job.folder), {"tensor_parallel_degree": 2, "hybrid_shard_degree": 4})
    trained = other.build(1)
    document.load_sharded(*trained, str(job.folder / "sharded"))
    return different(gathered(trained), expected)


def gathered(trained: Trained) -> dict[str, Any]:
    """What this tensor-parallel rank's part is, over all shards."""
    model, optimizer = trained
    out = {}
    with FSDP.summon_full_params(model, with_grads=False):
        out |= {name: p.detach().clone() for name, p in model.named_parameters()}
    slots = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    for name, values in slots.items():
        out |= {f"{name}.{slot}": torch.as_tensor(value) for slot, value in values.items()}
    return out


CASES = (local, in_s3, sharded, full, hooks, resharded)


def all_cases(
    folder: str, degrees: dict[str, int], environment: dict[str, str], cases: list[str]
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    os.environ.update(environment)
    with provide(["sagemaker"]):
        job = Job(folder, degrees)
        out: dict[str, Any] = {}
        for case in CASES:
            if case.__name__ not in cases:
                continue
            try:
                out[case.__name__] = case(job)
            except Exception:  # told by case; what raises, raises on all ranks
                out[case.__name__] = traceback.format_exc()
        return out


# -- the tests -------------------------------------------------------------------------------------

Ran = tuple[Path, list[dict[str, Any]]]


def run_cases(folder: Path, degrees: dict[str, int], server: Server, *cases: str) -> Ran:
    llama = ref.model("llama")
    state = ref.on_disk(llama, folder / "hub")
    torch.save((state, llama.config.to_dict()), folder / "llama.pt")
    chosen = list(cases) or [case.__name__ for case in CASES]
    return folder, run_ranks(
        all_cases, WORLD, str(folder), degrees, dict(server.environment), chosen, timeout=240
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, s3_server: Server) -> Ran:
    degrees = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
    return run_cases(tmp_path_factory.mktemp("smp"), degrees, s3_server)


def test_the_documentations_local_save_and_load_resume_exactly(ran: Ran) -> None:
    for rank in ran[1]:
        assert rank["local"] == {"resumed": [], "a step later": []}


def test_the_groups_of_a_local_save_are_one_step(ran: Ran) -> None:
    (found,) = smckpt.find_checkpoints(ran[0] / "local")
    assert len(found.groups) == 4 and found.path == str(ran[0] / "local")


def test_the_documentations_save_to_s3_is_loaded_at_once(ran: Ran) -> None:
    assert [rank["in_s3"] for rank in ran[1]] == [[]] * WORLD


def test_the_documentations_sharded_save_and_load_resume_exactly(ran: Ran) -> None:
    for rank in ran[1]:
        assert rank["sharded"] == {"resumed": [], "a step later": []}


def test_the_tensor_parallel_directories_of_a_sharded_save_are_one_step(ran: Ran) -> None:
    (found,) = smckpt.find_checkpoints(ran[0] / "sharded")
    assert found.groups == ("tp0_ep0", "tp1_ep0")


def test_a_sharded_save_loads_at_another_shard_degree(ran: Ran) -> None:
    assert [rank["resharded"] for rank in ran[1]] == [[]] * WORLD


def test_the_documentations_full_save_is_read_by_from_pretrained(ran: Ran) -> None:
    own = "model.layers.0.self_attention.layernorm_qkv.key_weight"
    assert [rank["full"] for rank in ran[1]] == [[own], *[[]] * (WORLD - 1)]
    model = document.load_full(str(ran[0] / "full"))
    assert different(model.state_dict(), torch.load(ran[0] / "llama.pt")[0]) == []


def test_hooks_run_before_the_write_and_after_the_commit(ran: Ran) -> None:
    for rank in ran[1]:
        told = rank["hooks"]
        assert told["heard"] == ["before", "after"] * 2 + ["raised"]
        assert told["read"] == [{"step": 3}] * 2
        assert told["names"] == [
            f"{BUCKET}/smp/hooks/tp{tp}_fsdp{shard}" for tp in (0, 1) for shard in (0, 1)
        ]


@pytest.mark.long
@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor_parallel_degree": 4, "hybrid_shard_degree": 2},
        {"tensor_parallel_degree": 1, "hybrid_shard_degree": 4},
        {"tensor_parallel_degree": 2, "hybrid_shard_degree": 0},
        {"tensor_parallel_degree": 1, "hybrid_shard_degree": 2},
    ],
    ids=str,
)
def test_other_degrees(tmp_path: Path, s3_server: Server, degrees: dict[str, int]) -> None:
    for rank in run_cases(tmp_path, degrees, s3_server, "local", "sharded")[1]:
        assert set(rank) == {"local", "sharded"}
        assert all(told == {"resumed": [], "a step later": []} for told in rank.values())


# -- in one process ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is not a known parameter"),
        ({"sm_activation_offloading": True}, "sm_activation_offloading=True is not honoured"),
        ("/no/such.json", "cannot be read"),
        (None, "without a process group"),
    ],
)
def test_what_init_cannot_do_is_refused(config: Any, words: str) -> None:
    with pytest.raises(smckpt.UsageError, match=words):
        sagemaker.init(config)
    assert not sagemaker.is_initialized()


def test_what_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    refusals = [
        (lambda: sagemaker.transform(torch.nn.Linear(2, 2)), "transform"),
        (lambda: sagemaker.state.tp_rank, "tp_rank was read before"),
        (lambda: state_dict_saver.async_save({}, sharded_strategy="torch_dist"), "sharded_strat"),
        (lambda: state_dict_saver.async_save({}, queue="mine"), "queue is a str"),  # type: ignore[arg-type]
        (lambda: s3_filesystem.S3FileSystem().listdir("s3://b", detail=True), "detail=True"),
    ]
    for act, words in refusals:
        with pytest.raises(smckpt.UsageError, match=words):
            act()


def test_a_bucket_tells_its_region(s3_root: str) -> None:
    assert s3_filesystem.get_s3_region_from_uri(Path(s3_root)) == os.environ["SMCKPT_S3_REGION"]
    with pytest.raises(smckpt.StorageError, match="did not tell its region"):
        s3_filesystem.get_s3_region_from_uri("s3://no-such-bucket-here/x")


def test_names_of_places_in_s3_survive_pathlib() -> None:
    lost = Path("s3://bucket/run") / "0"
    assert s3_filesystem.is_s3_uri(lost) and not s3_filesystem.is_s3_uri("/fsx/run")
    assert s3_filesystem.format_s3_path(lost) == "s3://bucket/run/0"
    assert s3_filesystem.parse_s3_uri(lost) == ("bucket", "run/0")


def test_an_interval_is_the_steps_that_the_slowest_save_takes() -> None:
    found = state_dict_utils.compute_auto_checkpoint_interval(
        [1.0, 2.0], [1.5, 1.5], [0.5, 0.1], [2.6, 2.0]
    )
    assert found.interval == 4 and state_dict_utils._Interval(**asdict(found)) == found


def test_only_what_is_committed_counts_when_old_directories_go(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        smckpt.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / f"{step}steps", step=step)
    (tmp_path / "11steps").mkdir()
    (part,) = (tmp_path / "10steps").glob("part-*")
    shutil.copy(part, tmp_path / "11steps")
    (tmp_path / "notes").mkdir()
    limit = functools.partial(utils.limit_num_subdirs, tmp_path, regex=r"^.*\d+steps$")
    assert limit(0) == limit(1, log=False) == []
    assert limit(2) == ["1steps"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10steps", "11steps", "2steps", "notes"]

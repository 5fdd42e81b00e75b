"""NeMo's archives are exported from where they are: nothing is unpacked, and nothing is followed.

Where SMCKPT_NEMO names a folder with NeMo, its own `save_to` writes them. Elsewhere Python's
tarfile packs what that puts together: `torch.save` of the ranks' states, or a distributed
checkpoint.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from smckpt import ExportOptions, errors, export_hf
from smckpt.cli.app import app
from smckpt.formats import source_files as folders
from smckpt.formats.source_files import SourceFiles
from tests.support import interpreters
from tests.support.limits import seconds
from tests.support.models import references
from tests.support.models.references import each_rank, on_disk

State = dict[str, torch.Tensor]
SCRIPT = Path(__file__).parents[1] / "support" / "models" / "nemo_writers.py"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = references.model("llama", num_hidden_layers=4)
    return model, on_disk(model, tmp_path_factory.mktemp("llama"))


def assert_same(directory: Path, wanted: State) -> None:
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def packed(folder: Path, path: Path, mode: Any = "w") -> Path:
    (folder / "model_config.yaml").write_text("target: nemo\n")
    with tarfile.open(path, mode) as archive:
        archive.add(folder, arcname=".")
    return path


def ranks_of(state: State, tp: int, pp: int = 1) -> dict[str, State]:
    """The directory of each rank → its weights, under the name of the attribute of NeMo's model."""
    out: dict[str, State] = {}
    for t, cut in enumerate(each_rank(lambda r, e: references.mcore(state, tp, r), tp)):
        for p in range(pp):
            name = f"tp_rank_{t:02d}_pp_rank_{p:03d}" if pp > 1 else f"mp_rank_{t:02d}"
            out[name if tp * pp > 1 else "."] = {
                f"model.{renumbered(name, p, pp)}": tensor
                for name, tensor in cut.items() if stage_of(name, pp) == p
            }  # fmt: skip
    return out


def stage_of(name: str, pp: int) -> int:
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2]) * pp // 4
    return 0 if name.startswith("embedding") else pp - 1


def renumbered(name: str, p: int, pp: int) -> str:
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(int(parts[2]) - p * 4 // pp)
    return ".".join(parts)


def nemo(folder: Path, ranks: dict[str, State]) -> Path:
    for name, state in ranks.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        extra = {"model.decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(b"x")}
        torch.save({**state, **extra}, folder / name / "model_weights.ckpt")
    return folder


def written(
    tmp_path: Path, state: State, kinds: list[tuple[int, int, str]]
) -> list[dict[str, Any]]:
    """What NeMo itself writes of each (tp, pp, kind). SMCKPT_NEMO: as in PYTHONPATH, where
    nemo_toolkit 2.2.1 and what it imports are, for the interpreter of SMCKPT_MEGATRON_PYTHON. It
    imports lightning 2.4, pangu 4, nemo_run 0.4 and numcodecs 0.15, not later ones, and for its
    distributed checkpoints megatron-core 0.15: 0.16 has no `tensorstore`, and 0.11 does not write
    under torch 2.13."""
    jobs = []
    for tp, pp, kind in kinds:
        place = tmp_path / f"{tp}-{pp}-{kind}"
        place.mkdir()
        for rank in range(tp):
            torch.save(references.mcore(state, tp, rank, local=True), place / f"{rank}-0.pt")
        save = place / ("llama" if kind == "directory" else "model.nemo")
        jobs.append({"tp": tp, "pp": pp, "kind": kind, "weights": str(place), "save": str(save)})
    interpreters.run(interpreters.megatron(), SCRIPT, json.dumps(jobs), timeout=250)
    return jobs


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("SMCKPT_NEMO"), reason="no folder with nemo")
def test_what_nemo_itself_packs_is_exported(tmp_path, llama, monkeypatch, judged):
    model, state = llama
    monkeypatch.setenv("PYTHONPATH", os.environ["SMCKPT_NEMO"])
    kinds = [(1, 1, "ranks"), (2, 1, "ranks"), (2, 2, "ranks"), (2, 1, "sharded"),
             (1, 2, "sharded")]  # fmt: skip
    for job in written(tmp_path, state, kinds):
        sharded = job["kind"] == "sharded"
        report = export_hf(
            job["save"], tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
        )
        assert report.source.startswith("NeMo, Megatron-core's" if sharded else "NeMo"), job
        # a sharded state has the names of Transformer Engine's spec
        assert report.layout == ("mcore_te" if sharded else "mcore_local"), job
        assert_same(tmp_path / "hf", state)
        judged("llama", "NeMo archive", exports=["NeMo"], at=str(job["tp"]))


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("SMCKPT_NEMO"), reason="no folder with nemo")
def test_the_directory_that_nemo_2_itself_writes_is_exported(tmp_path, llama, monkeypatch, judged):
    """NeMo's own: LlamaModel, a Trainer with MegatronStrategy and MegatronCheckpointIO, on CPU, and
    the connector's `nemo_save`, with which its importers (`llm.import_ckpt`) end. What stands in:
    the trainer does not train, and has no optimizer; the script sets up the process groups and puts
    in the weights; the layers have the local spec, without Transformer Engine."""
    model, state = llama
    monkeypatch.setenv("PYTHONPATH", os.environ["SMCKPT_NEMO"])
    kinds = [(1, 1, "directory"), (2, 1, "directory"), (2, 2, "directory")]
    for job in written(tmp_path, state, kinds):
        path = Path(job["save"])
        assert sorted(entry.name for entry in path.iterdir()) == ["context", "weights"]
        assert {"io.json", "model.yaml"} <= {entry.name for entry in (path / "context").iterdir()}
        for given in (path, path / "weights"):
            report = export_hf(
                given, tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
            )
            assert report.source == "NeMo, Megatron-core's distributed checkpoint (torch_dist)"
            assert report.layout == "mcore_te", job
            assert_same(tmp_path / "hf", state)
        judged("llama", "NeMo directory", exports=["NeMo"], at=str(job["tp"]))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_an_archive_is_exported_where_it_is(tmp_path, llama, judged, tp, pp):
    model, state = llama
    folder = nemo(tmp_path / "unpacked", ranks_of(state, tp, pp))
    path = packed(folder, tmp_path / "model.nemo")
    before = sorted(tmp_path.iterdir())
    for given in (path, folder):
        report = export_hf(
            given, tmp_path / "hf", config=model.config, options=ExportOptions(overwrite=True)
        )
        assert (report.source, report.layout) == ("NeMo", "mcore_te")
        assert_same(tmp_path / "hf", state)
    model.config.save_pretrained(tmp_path / "config")
    app(
        ["export", str(path), str(tmp_path / "hf"), "--config", str(tmp_path / "config"),
         "--overwrite"],
        standalone_mode=False,
    )  # fmt: skip
    assert_same(tmp_path / "hf", state)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "config", tmp_path / "hf"])
    judged("llama", "NeMo archive", exports=["formulas"], at=str(tp))


def test_an_archive_of_a_distributed_checkpoint_is_exported(tmp_path, llama, judged):
    """DCP's own writer; what is Megatron's in it is tested with Megatron's (test_megatron.py)."""
    model, state = llama
    weights = tmp_path / "unpacked" / "model_weights"
    named = {f"model.{n}": t for n, t in references.mcore(state, 1, 0).items()}
    dcp.save(named, checkpoint_id=weights, no_dist=True)
    torch.save({"iteration": 7}, weights / "common.pt")
    (weights / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    path = packed(tmp_path / "unpacked", tmp_path / "model.nemo")
    report = export_hf(path, tmp_path / "hf", config=model.config)
    assert report.source == "NeMo, Megatron-core's distributed checkpoint (torch_dist)"
    assert_same(tmp_path / "hf", state)
    judged("llama", "NeMo archive", exports=["formulas"], at="1")
    (weights / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(errors.UsageError, match=r"in its format zarr.*torch_dist"):
        export_hf(packed(tmp_path / "unpacked", path), tmp_path / "no", config=model.config)


def test_show_names_the_ranks_in_the_archive(tmp_path, llama, capsys):
    _, state = llama
    path = packed(nemo(tmp_path / "unpacked", ranks_of(state, 2)), tmp_path / "model.nemo")
    app(["show", str(path)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "NeMo" in shown and "mp_rank_01/model_weights.ckpt" in shown


@pytest.mark.long
def test_a_large_archive_stays_out_of_memory(tmp_path):
    """Tensors of 768 MB in two ranks' files: less than half of it is resident."""
    folder = tmp_path / "unpacked"
    for rank in range(2):
        (folder / f"mp_rank_{rank:02d}").mkdir(parents=True)
        torch.save({f"w{i}": torch.full((12 << 20,), float(8 * rank + i)) for i in range(8)},
                   folder / f"mp_rank_{rank:02d}" / "model_weights.ckpt")  # fmt: skip
    path = packed(folder, tmp_path / "model.nemo")
    code = (
        "import re, sys; from smckpt.formats.readers.rank_sources import open_source\n"
        "from smckpt.formats.readers.rank_files import open_files\n"
        "from smckpt.formats.degrees import Degrees\n"
        "from smckpt.translate.ranks.translated import whole, TranslatedSource\n"
        "from smckpt.translate.files import arrange\n"
        "from smckpt.translate.tables.pieces import TensorKey\n"
        "found = open_source(sys.argv[1])\n"
        "reader = open_files(found.states, Degrees.of(2, 1), found.source)\n"
        "source = TranslatedSource(reader)\n"
        "def most():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = most()\n"
        "for rank in range(2):\n"
        "    keys = [TensorKey(name, rank, 0) for name in reader.held]\n"
        "    targets = [whole(key, (12 << 20,), 'float32') for key in keys]\n"
        "    for file in arrange(targets, 1 << 40):\n"
        "        for chunk in file.chunks(16 << 20):\n"
        "            (plan,) = source.plans_of([chunk])\n"
        "            source.read(plan, [memoryview(bytearray(r.nbytes)) for r in chunk.ranges])\n"
        "print(most() - before)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(240),
    ).stdout
    assert int(told) << 10 < 384 << 20


# -- what is damaged or hostile is refused ---------------------------------------------------------


def member(name: str, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def weights(change: Callable[[bytearray], object] = lambda data: None) -> bytes:
    made = io.BytesIO()
    torch.save({"model.w": torch.arange(4096.0)}, made)
    data = bytearray(made.getvalue())
    change(data)
    return bytes(data)


def flip(data: bytearray) -> None:
    data[data.index(torch.arange(4096.0).numpy().tobytes()[64:128])] ^= 1


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([member("../model_weights.ckpt", weights())], "outside of it"),
        ([member("/etc/passwd", b"x")], "outside of it"),
        ([member("a/../../model_weights.ckpt", weights())], "outside of it"),
        ([member("model_weights.ckpt", weights()), member("./model_weights.ckpt", weights())],
         "model_weights.ckpt twice"),
        ([member("model_weights.ckpt", weights(flip))], "differ from the CRC-32"),
        ([member("model_weights.ckpt", weights()[:-300])], "no whole archive of torch.save"),
        ([member("mp_rank_01/model_weights.ckpt", weights())], "rank 0, .*missing"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_leads_out_is_refused(tmp_path, members, told):
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(errors.CheckpointError, match=told):
        export_hf(path, tmp_path / "hf")


def test_a_link_in_the_archive_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(weights())
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        path = tmp_path / "model.nemo"
        with tarfile.open(path, "w") as archive:
            info, _ = member("model_weights.ckpt", type=kind, linkname=str(tmp_path / "secret"))
            archive.addfile(info)
        source = SourceFiles()
        assert folders.open_tar(source, source.whole(str(path))).files == {}
        with pytest.raises(errors.UsageError, match="no model that smckpt knows"):
            export_hf(path, tmp_path / "hf")


def test_sizes_that_lie_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "model.nemo"
    with tarfile.open(path, "w") as archive:
        info, data = member("model_weights.ckpt", weights())
        archive.addfile(info, io.BytesIO(data))
    whole = path.read_bytes()
    info.size = 1 << 40
    path.write_bytes(info.tobuf() + whole[512:])
    with pytest.raises(errors.CorruptCheckpointError, match="no whole archive of tar"):
        export_hf(path, tmp_path / "hf")
    path.write_bytes(whole[:1536])  # cut short
    with pytest.raises(errors.CorruptCheckpointError, match="no whole archive of tar"):
        export_hf(path, tmp_path / "hf")
    info.size, info.type = 1 << 33, tarfile.XHDTYPE  # a header that would fill the memory
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + whole)
    with pytest.raises(errors.CorruptCheckpointError, match=r"a header of \d+ bytes"):
        export_hf(path, tmp_path / "hf")
    path.write_bytes(whole)
    monkeypatch.setattr(folders, "_MEMBERS", 0)
    with pytest.raises(errors.CorruptCheckpointError, match="more than 0 members"):
        export_hf(path, tmp_path / "hf")


def test_a_compressed_archive_is_refused_with_the_command(tmp_path, llama):
    model, state = llama
    folder = nemo(tmp_path / "unpacked", ranks_of(state, 1))
    path = packed(folder, tmp_path / "model.nemo", "w:gz")
    with pytest.raises(errors.UsageError, match=r"gzip -dc model\.nemo > model\.nemo\.tar"):
        export_hf(path, tmp_path / "hf")
    subprocess.run(
        "gzip -dc model.nemo > model.nemo.tar",
        shell=True,
        check=True,
        cwd=tmp_path,
        timeout=seconds(60),
    )
    export_hf(tmp_path / "model.nemo.tar", tmp_path / "hf", config=model.config)
    assert_same(tmp_path / "hf", state)

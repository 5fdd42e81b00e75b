"""Checkpoints in tensor-parallel layouts: whole distributed tensors, and ranks' own plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smckpt import ExportOptions, ImportOptions, Parallel, errors, export_hf, import_hf
from smckpt.layout.entries import Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh
from smckpt.layout.mesh import Placement as P
from smckpt.topology import ParallelState
from tests.support.models import references as ref
from tests.support.models import shards

State = dict[str, torch.Tensor]
R = P("replicate")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Any, State]:
    model = ref.model("llama_biased")
    return model, ref.on_disk(model, tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> tuple[Any, State]:
    model = ref.model("mixtral")
    return model, ref.on_disk(model, tmp_path_factory.mktemp("hub"))


def same(folder: Path, wanted: State) -> bool:
    found: State = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def joined(cuts: list[State]) -> tuple[State, dict[str, P]]:
    """Global tensors, as DTensors over a mesh of the tensor-parallel ranks have them, and how."""
    out, how = {}, {}
    for name, first in cuts[0].items():
        parts = [cut[name] for cut in cuts]
        dim = (
            1
            if name.endswith(("linear_proj.weight", "fc2.weight", "proj.weight", "fc2_weight"))
            else 0
        )
        alike = all(torch.equal(first, other) for other in parts)
        out[name] = first if alike else torch.cat(parts, dim)
        how[name] = R if alike else P("shard", dim)
    return out, how


def one(name: str, geometry: Any, rank: int, tensor: torch.Tensor) -> tuple[Entry, torch.Tensor]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    entry = Entry(("model", name), dtype, geometry, ("model",), (), (rank,))
    return entry, tensor.contiguous()


def dtensors(cuts: list[State], dp: int) -> Callable[[int], shards.Held]:
    """FSDP over TP, tensors distributed over both: FSDP cuts dimension 0 of what TP left."""
    t = len(cuts)
    whole, how = joined(cuts)
    mesh = Mesh(("dp", "tp"), (dp, t), tuple(range(dp * t)))

    def held(rank: int) -> shards.Held:
        out = []
        for name, tensor in whole.items():
            place = how[name]
            first = P("strided", 0, t) if place == P("shard", 0) else P("shard", 0)
            geometry = MeshGeometry(name, tuple(tensor.shape), mesh, (first, place))
            out.append(shards._held(("model",), name, name, geometry, rank, whole, tensor.dtype))
        return out

    return held


@pytest.mark.parametrize("layout", ["mcore_te", "te_split"])
@pytest.mark.parametrize(("t", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_distributed_tensors_of_a_transformed_model(tmp_path, llama, layout, t, dp):
    model, state = llama
    cut = ref.mcore if layout == "mcore_te" else ref.te
    cuts = [cut(state, t, r) for r in range(t)]
    topology = ParallelState(t * dp, tensor_parallel_degree=t).to_json()
    path = shards.write(tmp_path / "c", t * dp, dtensors(cuts, dp), topology=topology)
    report = export_hf(path, tmp_path / "hf", config=model.config)
    assert report.layout == layout
    assert same(tmp_path / "hf", state)


def test_the_degree_can_be_given_where_it_was_not_recorded(tmp_path, llama):
    model, state = llama
    cuts = [ref.te(state, 2, r) for r in range(2)]
    path = shards.write(tmp_path / "c", 2, dtensors(cuts, 1))
    export_hf(path, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2))
    assert same(tmp_path / "hf", state)


def plain(cuts: list[State], rank: int) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Every rank keeps its own tensors, as Megatron's modules do without FSDP."""
    for name, tensor in cuts[rank].items():
        yield one(name, PerRankGeometry((name,), tuple(tensor.shape), (rank,)), rank, tensor)


@pytest.mark.parametrize("layout", ["mcore_local", "te_split"])
def test_plain_tensors_of_ranks_are_placed_by_the_recorded_topology(tmp_path, llama, layout):
    model, state = llama
    cut = ref.te if layout == "te_split" else lambda s, t, r: ref.mcore(s, t, r, local=True)
    cuts = [cut(state, 4, r) for r in range(4)]
    topology = ParallelState(4, tensor_parallel_degree=4).to_json()
    path = shards.write(tmp_path / "c", 4, lambda r: list(plain(cuts, r)), topology=topology)
    export_hf(path, tmp_path / "hf", config=model.config)
    assert same(tmp_path / "hf", state)


def test_plain_tensors_of_expert_parallel_ranks(tmp_path, mixtral):
    model, state = mixtral
    cuts = ref.each_rank(lambda r, e: ref.mcore(state, 2, r, 2, e), 2, 2)
    topology = ParallelState(
        4, tensor_parallel_degree=2, expert_parallel_degree=2
    ).to_json()  # fmt: skip
    path = shards.write(tmp_path / "c", 4, lambda r: list(plain(cuts, r)), topology=topology)
    export_hf(path, tmp_path / "hf", config=model.config)
    assert same(tmp_path / "hf", state)


def test_a_topology_that_is_not_the_jobs_is_refused(tmp_path, mixtral):
    """Shapes do not tell it; ranks that it says are alike are not."""
    model, state = mixtral

    def export(name: str, cuts: list[State], **degrees: Any) -> Path:
        topology = ParallelState(len(cuts), **degrees).to_json()
        path = shards.write(
            tmp_path / name, len(cuts), lambda r: list(plain(cuts, r)), topology=topology
        )
        export_hf(path, tmp_path / f"{name}-hf", config=model.config)
        return tmp_path / f"{name}-hf"

    by_rank = [ref.mcore(state, 1, 0, 2, r % 2) for r in range(4)]  # Megatron's, of two that are cp
    both = {"context_parallel_degree": 2, "expert_parallel_degree": 2}
    with pytest.raises(errors.TensorMismatchError, match=r"are both \(tp, ep\).*order="):
        export("cp", by_rank, **both)
    order = ("tp", "ep", "cp", "fsdp", "rep", "pp")
    assert same(export("right", by_rank, order=order, **both), state)
    outermost = [ref.mcore(state, 2, r // 4) for r in range(8)]
    with pytest.raises(errors.TensorMismatchError, match=r"ranks \d and \d are both"):
        export("tp", outermost, tensor_parallel_degree=2)


def experts_apart(state: State, t: int, ep: int, etp: int, world: int) -> list[State]:
    """Megatron's ranks where experts are cut into `etp`, and layers into `t`."""
    out = []
    for r in range(world):
        layers = ref.mcore(state, t, r % t)
        experts = ref.mcore(state, etp, r % etp, ep, r // etp % ep)
        out.append(
            {n: x for n, x in layers.items() if ".experts." not in n}
            | {n: x for n, x in experts.items() if ".experts." in n}
        )
    return out


@pytest.mark.parametrize(
    ("t", "ep", "etp", "columns", "dp"),
    [(2, 1, 1, 1, 1), (2, 2, 1, 1, 2), (2, 4, 1, 2, 1), (1, 2, 2, 4, 1), (4, 1, 2, 1, 1)],
)
def test_experts_cut_otherwise_than_layers(tmp_path, mixtral, t, ep, etp, columns, dp):
    model, state = mixtral
    world = t * columns * dp
    cuts = experts_apart(state, t, ep, etp, world)
    topology = ParallelState(
        world, tensor_parallel_degree=t, expert_parallel_degree=columns
    ).to_json()
    path = shards.write(tmp_path / "c", world, lambda r: list(plain(cuts, r)), topology=topology)
    export_hf(path, tmp_path / "hf", config=model.config, parallel=Parallel(ep=ep, etp=etp))
    assert same(tmp_path / "hf", state)
    with pytest.raises(errors.CheckpointError, match="etp="):  # and not without a word
        export_hf(path, tmp_path / "no", config=model.config, parallel=Parallel(layout="mcore_te"))
    files = []
    for rank, cut in enumerate(cuts[: t * columns]):
        files.append(tmp_path / f"rank{rank}.pt")
        torch.save(cut, files[-1])
    degrees = {"tp": t, "ep": ep, "etp": etp}
    export_hf(files, tmp_path / "hf2", config=model.config, parallel=Parallel(**degrees))
    assert same(tmp_path / "hf2", state)
    drifted = {n: x + 1 if "experts" in n else x for n, x in cuts[-1].items()}
    torch.save(drifted, files[-1])
    if (t, ep, etp) != (2, 2, 1) and etp * ep < t * columns:  # each is in several ranks
        with pytest.raises(errors.TensorMismatchError, match="copies differ.*experts"):
            export_hf(files, tmp_path / "no", config=model.config, parallel=Parallel(**degrees))
    # the way back writes what these ranks hold
    options = ImportOptions(pad_vocab_to_multiple_of=128 // t)
    to = Parallel("mcore_te", **degrees)
    report = import_hf(tmp_path / "hf2", tmp_path / "ranks", to, prefix="", options=options)
    for file, cut in zip(report.files, cuts, strict=False):
        found = load_file(tmp_path / "ranks" / file)
        assert found.keys() == {n for n in cut if not n.endswith("_extra_state")}
        assert [n for n, x in found.items() if "embed" not in n and "output" not in n
                and not torch.equal(x, cut[n])] == []  # fmt: skip


def test_experts_cut_otherwise_are_refused_where_the_recorded_ranks_do_not_tell_them(
    tmp_path, mixtral
):
    model, state = mixtral
    cuts = experts_apart(state, 2, 4, 1, 4)
    for order, columns, words in (
        (("tp", "cp", "ep", "fsdp", "rep", "pp"), 1, "need 4 ranks|4 ranks that differ"),
        (("ep", "tp", "cp", "fsdp", "rep", "pp"), 2, "recorded order is ep, tp"),
    ):
        state_ = ParallelState(
            4, tensor_parallel_degree=2, expert_parallel_degree=columns, order=order
        )
        path = shards.write(
            tmp_path / order[0], 4, lambda r: list(plain(cuts, r)), topology=state_.to_json()
        )
        with pytest.raises(errors.UsageError, match=words):
            export_hf(path, tmp_path / "hf", config=model.config, parallel=Parallel(ep=4, etp=1))


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_shards_of_each_tensor_parallel_ranks_own_fsdp_group(tmp_path, llama, kind):
    model, state = llama
    t, dp = 2, 3
    cuts = [ref.mcore(state, t, r) for r in range(t)]

    def held(rank: int) -> shards.Held:
        own = cuts[rank % t]
        ranks = tuple(range(rank % t, t * dp, t))
        mesh = Mesh(("replicate", "shard"), (1, dp), ranks)
        if kind == "fsdp2":
            return [
                shards._held(("model",), n, n, MeshGeometry(
                    n, tuple(x.shape), mesh, (R, P("shard", 0))), rank, own, x.dtype)
                for n, x in own.items()
            ]  # fmt: skip
        segments = tuple(Segment(n, tuple(x.shape), x.numel()) for n, x in own.items())
        unit = FlatUnit(segments, -(-sum(s.numel for s in segments) // dp))
        flat = FlatGeometry(unit, mesh)
        return [shards._held(("model",), "_flat_param", None, flat, rank, own, torch.float32)]

    topology = ParallelState(t * dp, tensor_parallel_degree=t).to_json()
    path = shards.write(tmp_path / "c", t * dp, held, topology=topology)
    export_hf(path, tmp_path / "hf", config=model.config)
    assert same(tmp_path / "hf", state)


def test_packed_experts_of_transformers_own_parallelism(tmp_path, mixtral):
    model, state = mixtral
    memory = {n: t.detach() for n, t in model.state_dict().items()}
    mesh = Mesh(("tp",), (2,), (0, 1))

    def held(rank: int) -> shards.Held:
        out = []
        for name, tensor in memory.items():
            place = R
            if name.endswith("gate_up_proj"):
                place = P("strided", 1, 2)
            elif name.endswith("experts.down_proj"):
                place = P("shard", 2)
            elif name.endswith(("q_proj.weight", "lm_head.weight")):
                place = P("shard", 0)
            geometry = MeshGeometry(name, tuple(tensor.shape), mesh, (place,))
            out.append(shards._held(("model",), name, name, geometry, rank, memory, tensor.dtype))
        return out

    for number, topology in enumerate((None, ParallelState(2, tensor_parallel_degree=2).to_json())):
        path = shards.write(tmp_path / f"c{number}", 2, held, topology=topology)
        report = export_hf(path, tmp_path / f"hf{number}", config=model.config)
        assert report.layout == "hf_tp"
        assert same(tmp_path / f"hf{number}", state)


def test_parts_under_hugging_faces_names_do_not_pass_for_the_model(tmp_path, llama, mixtral):
    """Their names are the model's, so without a config nothing but the ranks tells."""
    for number, (model, state) in enumerate((llama, mixtral)):
        model.save_pretrained(tmp_path / f"hub{number}")
        place = tmp_path / f"c{number}"
        import_hf(tmp_path / f"hub{number}", place, Parallel("hf_tp", tp=2))
        report = export_hf(place, tmp_path / f"hf{number}")
        assert report.layout == "hf_tp" and same(tmp_path / f"hf{number}", state)
        (place / "config.json").unlink()
        with pytest.raises(errors.UsageError, match=r"no config was given.*pass config="):
            export_hf(place, tmp_path / "no", options=ExportOptions(against_model=False))
        with pytest.raises(errors.UsageError, match="no whole tensors"):
            export_hf(
                place, tmp_path / "no", config=model.config, options=ExportOptions(naming="module")
            )


def test_copies_of_tensor_parallel_ranks_are_whole_tensors(tmp_path, llama):
    model, state = llama
    topology = ParallelState(2, tensor_parallel_degree=2).to_json()
    path = shards.write(tmp_path / "c", 2, lambda r: shards.own(state, r), topology=topology)
    report = export_hf(path, tmp_path / "hf", config=model.config)
    assert report.layout is None and same(tmp_path / "hf", state)


def test_plain_tensors_without_a_topology_are_refused(tmp_path, llama):
    model, state = llama
    cuts = [ref.mcore(state, 2, r) for r in range(2)]
    path = shards.write(tmp_path / "c", 2, lambda r: list(plain(cuts, r)))
    with pytest.raises(errors.TopologyError, match="parallel_state="):
        export_hf(path, tmp_path / "hf", config=model.config, parallel=Parallel(tp=2))


def test_a_degree_other_than_the_recorded_one_is_refused(tmp_path, llama):
    model, state = llama
    cuts = [ref.mcore(state, 2, r) for r in range(2)]
    topology = ParallelState(2, tensor_parallel_degree=2).to_json()
    path = shards.write(tmp_path / "c", 2, lambda r: list(plain(cuts, r)), topology=topology)
    with pytest.raises(errors.UsageError, match="tp=4.*saved with tp=2"):
        export_hf(path, tmp_path / "hf", config=model.config, parallel=Parallel(tp=4))

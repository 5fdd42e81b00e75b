"""Which ranks of a live model hold what: tensor- and expert-parallel coordinates and shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from smckpt.errors import TensorMismatchError, TopologyError
from smckpt.layout.geometry import Box, Piece
from smckpt.layout.mesh import Shape
from smckpt.state_dict.gather import Told
from smckpt.topology import ParallelState
from smckpt.topology.mesh import role_of
from smckpt.translate.pieces import Held, Key

__all__ = ["Places", "places_of_ranks"]

_Rows = dict[int, Told]
Coordinate = tuple[int, int]  # tensor-parallel, expert-parallel


def places_of_ranks(told: list[dict[str, Told]], state: ParallelState | None) -> Places:
    """What ranks told, in order.

    Raises:
        TopologyError: which rank is which is not known; `state` is not this job's, or contradicts
            the meshes.
    """
    meshes = [_from_meshes(rows, known=state is None) for rows in told]
    if state is not None:
        at = _from_state(state, len(told))
        for rank, (mesh, here) in enumerate(zip(meshes, at, strict=True)):
            _refuse_other(rank, mesh, here, state)
        return Places(told, at, state.tp_size, state.ep_size)
    sizes = {(m["tp"][0], m["ep"][0]) for m in meshes}
    everywhere = len(told) == 1 or any(
        len(row.ranks) == len(told) for rows in told for row in rows.values()
    )
    if len(sizes) > 1 or (sizes == {(1, 1)} and not everywhere):
        raise TopologyError(
            "ranks hold tensors of their own, and which are of which tensor-parallel rank is not "
            "known",
            remedy="pass parallel_state= to sm_state_dict_type",
        )
    ((tp, ep),) = sizes
    return Places(told, [(m["tp"][1], m["ep"][1]) for m in meshes], tp, ep)


def _from_state(state: ParallelState, ranks: int) -> list[Coordinate]:
    if state.world_size != ranks:
        raise TopologyError(
            f"parallel_state is of {state.world_size} ranks, the job has {ranks}",
            remedy="pass the ParallelState of this job",
        )
    if state.pp_size > 1:
        raise TopologyError(
            f"parallel_state has {state.pp_size} pipeline stages, which number their layers each "
            "for itself",
            remedy="take the full state of a model without pipeline parallelism",
        )
    return [(state.ranker.get_tp_rank(r), state.ranker.get_ep_rank(r)) for r in range(ranks)]


def _from_meshes(rows: Mapping[str, Told], *, known: bool) -> dict[str, tuple[int, int]]:
    """Size and index of the tensor- and the expert-parallel dimension of one rank's meshes.

    Args:
        known: every dimension must have a role that its name tells.
    """
    found = {"tp": (1, 0), "ep": (1, 0)}
    for dims in {row.dims for row in rows.values()}:
        for name, size, index in dims:
            role = role_of(name) if size > 1 else "rep"
            if role in ("tp", "ep", "pp") and found.setdefault(role, (1, 0)) not in (
                (1, 0), (size, index)
            ):  # fmt: skip
                raise TopologyError(
                    f"meshes of the model have {role} dimensions of different sizes",
                    remedy="pass parallel_state= to sm_state_dict_type",
                )
            if role in ("tp", "ep"):
                found[role] = (size, index)
            if known and role in (None, "pp"):
                raise TopologyError(
                    f"whether mesh dimension {name!r} is tensor-parallel is not known",
                    remedy="pass parallel_state= to sm_state_dict_type, or call the dimensions tp, "
                    "ep, dp_shard, dp_replicate",
                )
    return found


def _refuse_other(
    rank: int, mesh: Mapping[str, tuple[int, int]], here: Coordinate, state: ParallelState
) -> None:
    for role, index, size in (("tp", here[0], state.tp_size), ("ep", here[1], state.ep_size)):
        if mesh[role] not in ((1, 0), (size, index)):
            raise TopologyError(
                f"rank {rank} is {role} rank {index} of {size} by parallel_state, and "
                f"{mesh[role][1]} of {mesh[role][0]} by its device mesh",
                remedy="pass the parallel_state that the mesh was made from",
            )


@dataclass
class Places:
    """The tensors of all ranks, each with the coordinate of its rank: a proof's source."""

    told: list[dict[str, Told]]
    coordinates: list[Coordinate]
    tp: int
    ep: int
    url: str = ""
    rows: dict[str, _Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, names in enumerate(self.told):
            for name, row in names.items():
                self.rows.setdefault(name, {})[rank] = row
        self.held: Mapping[str, Held] = _Lazily(self)

    @property
    def many(self) -> bool:
        return self.tp * self.ep > 1

    def view(self, key: Key, shape: Shape) -> None:
        """Arrays are put together as they are held; who takes them sees them in that shape."""

    def places(self, row: Told) -> set[Coordinate]:
        return {self.coordinates[rank] for rank in row.ranks}

    def hold(self, name: str) -> Held:
        """Raises TopologyError, TensorMismatchError: the ranks' arrays are of no one tensor."""
        rows = self.rows[name]
        dtypes = {row.dtype for row in rows.values()}
        if len(dtypes) > 1:
            raise TensorMismatchError(
                f"{name} is {' and '.join(sorted(dtypes))} on different ranks",
                remedy="give it one dtype on all ranks",
            )
        shards: dict[Coordinate, Shape] = {}
        whole: Shape | None = None
        for rank, row in rows.items():
            places = self.places(row)
            if len(places) == 1:
                known = shards.setdefault(self.coordinates[rank], row.shape)
            else:
                known = whole = row.shape if whole is None else whole
            if known != row.shape or len(places) not in (1, self.tp * self.ep):
                raise TopologyError(
                    f"{name} is shared by ranks {list(row.ranks)}, which are neither all tensor- "
                    "and expert-parallel ranks nor one of them, or its shapes differ",
                    remedy="see that parallel_state= and the model's meshes are of one job",
                )
        if whole is not None and shards:
            raise TopologyError(
                f"{name} is distributed over tensor-parallel ranks on some ranks and not on others",
                remedy="distribute it alike on all ranks",
            )
        (dtype,) = dtypes
        return Held(name, dtype, shards, whole)

    def parts(self, key: Key, shape: Shape) -> tuple[tuple[int, Told, tuple[Piece, ...]], ...]:
        """Who sends which pieces of a stored tensor; of replicas the first.

        Raises:
            TopologyError: they do not make it up exactly.
        """
        seen: set[Box] = set()
        out = []
        for rank, row in self.rows[key.name].items():
            if key.tp >= 0 and self.coordinates[rank] != (key.tp, key.ep):
                continue
            new = tuple(piece for piece in row.pieces if piece.box not in seen)
            if new:
                seen.update(piece.box for piece in new)
                out.append((rank, row, new))
        if sum(box.numel for box in seen) != math.prod(shape):
            raise TopologyError(
                f"the ranks' parts of {key.name} do not make up its shape {list(shape)}",
                remedy="see that parallel_state= and the model's meshes are of one job",
            )
        return tuple(out)

    def replica(self, key: Key) -> tuple[tuple[int, Told, tuple[Piece, ...]], ...]:
        """The last rank that has a tensor of its own for that of `key`, if it is not the only one;
        who sends what, as `parts`."""
        found = [
            (rank, row, row.pieces) for rank, row in self.rows[key.name].items()
            if self.coordinates[rank] == (key.tp, key.ep) and row.ranks == (rank,)
        ]  # fmt: skip
        return tuple(found[-1:]) if len(found) > 1 else ()


class _Lazily(Mapping[str, Held]):
    """Names alone tell the layout; what is no weight need not make sense."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._known: dict[str, Held] = {}

    def __getitem__(self, name: str) -> Held:
        if name not in self._known:
            self._known[name] = self._places.hold(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places.rows)

    def __len__(self) -> int:
        return len(self._places.rows)

    def __contains__(self, name: object) -> bool:
        return name in self._places.rows

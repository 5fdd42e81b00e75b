"""Reads degrees and rank order from a torch `DeviceMesh`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from smckpt.errors import TopologyError, UsageError
from smckpt.topology.ranker import DEFAULT_ORDER

__all__ = ["order_of", "rank_in_job", "role_of", "roles_of"]

# The names of mesh dimensions in the examples of torch, torchtitan and transformers.
_USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "fsdp": ("fsdp", "dp_shard", "shard", "dp"),
    "rep": ("rep", "dp_replicate", "replicate", "ddp"),
    "pp": ("pp",),
}


def rank_in_job(mesh_size: int) -> int | None:
    """This process's rank, after a check that the mesh spans its job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size() != mesh_size:
        raise TopologyError(
            f"the mesh has {mesh_size} of the job's {dist.get_world_size()} ranks",
            remedy="pass the mesh over all ranks from which the others were cut",
        )
    return dist.get_rank()


def roles_of(dim_names: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """The role of each mesh dimension."""
    for role, dim in names.items():
        if role not in DEFAULT_ORDER:
            raise UsageError(f"names has no role {role!r}", remedy=f"roles are {DEFAULT_ORDER}")
        if dim not in dim_names:
            raise UsageError(
                f"names gives {role} to mesh dimension {dim!r}",
                remedy=f"the mesh has {dim_names}: name one of them",
            )
    given = {dim: role for role, dim in names.items()}
    roles = tuple(given.get(dim) or _usual_role(dim, dim_names) for dim in dim_names)
    if not roles or len(set(roles)) < len(roles):
        raise UsageError(
            f"mesh dimensions {dim_names} play the roles {roles}",
            remedy="give the mesh named dimensions, one for each role; pass names= to tell them",
        )
    return roles


def role_of(dim: str) -> str | None:
    """The role of a mesh dimension with a usual name."""
    return next((role for role, usual in _USUAL_NAMES.items() if dim in usual), None)


def _usual_role(dim: str, dim_names: tuple[str, ...]) -> str:
    role = role_of(dim)
    if role is not None:
        return role
    raise UsageError(
        f"mesh dimension {dim!r} of {dim_names} has no known role",
        remedy=f"pass names={{role: {dim!r}}} with a role out of {DEFAULT_ORDER}",
    )


def order_of(dims: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> tuple[str, ...]:
    """The rank order of a mesh: the dimension along which ranks step by 1 is innermost."""
    steps: dict[str, int] = {}
    below = 1  # ranks between two neighbours along the dimension, in the flattened mesh
    for dim, size in reversed(list(zip(dims, shape, strict=True))):
        steps[dim] = ranks[below] - ranks[0] if size > 1 else 0
        below *= size
    # dimensions of size 1 have no step: they keep their place in the default order
    large = sorted((dim for dim in dims if steps[dim]), key=lambda dim: steps[dim])
    places = iter(large)
    order = tuple(next(places) if dim in large else dim for dim in DEFAULT_ORDER)
    if list(ranks) != list(_numbered(dims, dict(zip(dims, shape, strict=True)), order)):
        raise TopologyError(
            f"the mesh {dict(zip(dims, shape, strict=True))} numbers its ranks {list(ranks)}",
            remedy="pass a mesh over all ranks of the job, numbered by some nesting of its "
            "dimensions",
        )
    return order


def _numbered(dims: Sequence[str], sizes: Mapping[str, int], order: Sequence[str]) -> Iterator[int]:
    """The flattened, row-major ranks that a mesh would have if `order` numbered them."""
    steps: dict[str, int] = {}
    step = 1
    for dim in order:
        steps[dim] = step
        step *= sizes.get(dim, 1)
    for at in itertools.product(*(range(sizes[dim]) for dim in dims)):
        yield sum(i * steps[dim] for i, dim in zip(at, dims, strict=True))

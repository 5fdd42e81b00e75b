"""The plan of a load: what a rank asks for, which bytes it reads, and into which tensors.

The whole plan is checked against the checkpoint before a tensor is touched.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import ReadPlan, plan_local, plan_logical
from smckpt.checkpoint.reading.plan_local import differing_names, refuse_names
from smckpt.engine.load_memory import LoadMemory, memory_of, whole_state
from smckpt.engine.load_rounds import Common
from smckpt.errors import CheckpointError, KeysMismatchError, TopologyError, UsageError
from smckpt.layout.containers import FACTS, lacking_keys, made_again
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.meeting.group import Group
from smckpt.state_dict.of_optimizers.bindings import optimizer_dicts
from smckpt.state_dict.of_optimizers.groups import number_as_saved
from smckpt.state_dict.of_optimizers.optimizers import named_as_target, prepare_optimizers
from smckpt.state_dict.parts import match
from smckpt.state_dict.restore import gathered_parts, make_read
from smckpt.state_dict.select import Selection, Selector
from smckpt.storage import Access, Storage
from smckpt.topology import ParallelState

if TYPE_CHECKING:
    import torch


log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load. The defaults suit a cluster; each line says when to change it.

    only: the top keys to load. With a target they are the target's; then no warning names what else
        is saved. Name some to leave the others in the checkpoint.
    renamed: the names that parameters or modules of the target have in the checkpoint, such as
        {"backbone": "encoder"}; all that is below a module follows it. The first that fits counts.
        For models: an optimizer's state is refused.
    preverify: read everything twice, the first time only to check, so that a bad block leaves the
        targets untouched.
    threads: reading threads per rank; None: one for each of the host's processors that are this
        rank's share, 4 to 16. A rank with one processor first reads in the calling thread, and
        starts the others when it waits for a file system's data.
    timeout: how many seconds each meeting of the ranks may take. Raise it for very slow storage;
        lower it to notice a dead peer sooner.
    groups: as in `SaveOptions`.
    parallel_state: as in `SaveOptions`. If ranks saved plain tensors of their own (tensor or expert
        parallelism), it decides whose tensors this rank takes. A job of another size must pass it.
    read_once: ranks that need the same bytes read each of them once and pass it on. None: from
        stores that are reached over a network (S3). Try True where the ranks of several hosts read
        from a file system that is slow for so many.
    """

    only: Sequence[str] | None = None
    renamed: Mapping[str, str] | None = None
    preverify: bool = False
    threads: int | None = None
    timeout: float = 1800.0
    groups: Sequence[Sequence[int]] | None = None
    parallel_state: ParallelState | None = None
    read_once: bool | None = None

    def __post_init__(self) -> None:
        names = [name for pair in dict(self.renamed or {}).items() for name in pair]
        count = "pass a positive number, or leave it out"
        for field, right, remedy in (
            ("only", not isinstance(self.only, str), "pass a list of top keys"),
            (
                "renamed",
                all(isinstance(name, str) and name for name in names),
                "pass {name in the target: name in the checkpoint}",
            ),
            ("preverify", isinstance(self.preverify, bool), "pass True or False"),
            (
                "read_once",
                self.read_once in (None, False, not self.preverify and sys.platform == "linux"),
                "pass True, False or None; and not True with preverify, where each rank checks all "
                "of its own, or without Linux",
            ),
            ("threads", self.threads is None or _positive(self.threads, int), count),
            ("timeout", _positive(self.timeout, (int, float)), count),
            (
                "parallel_state",
                isinstance(self.parallel_state, (ParallelState, type(None))),
                "pass a smckpt.ParallelState",
            ),
        ):
            if not right:
                raise UsageError(f"{field} is {getattr(self, field)!r}", remedy=remedy)


def _positive(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and value > 0


@dataclass(frozen=True)
class LoadRequest:
    """The checked arguments of a call of `load`. keys: its `check_keys_matched`. refusal: why the
    call fails, for the peers."""

    directory: str
    access: Access
    keys: bool | Literal["target"]
    options: LoadOptions
    refusal: Exception | None = None

    def __post_init__(self) -> None:
        if self.keys not in (True, False, "target"):
            raise UsageError(
                f"check_keys_matched is {self.keys!r}", remedy='pass True, False or "target"'
            )

    def refuse_target(self, target: Any) -> None:
        """
        Raises:
            UsageError: an option that this target, or none, cannot honour.
        """
        only, renamed = self.options.only, self.options.renamed
        if only is not None and target is not None and {*only} != {*target}:
            raise UsageError(
                f"only is {only!r}, and there is a target with {[*target]}",
                remedy="pass the keys without a target, or a target with those keys",
            )
        if renamed is None:
            return
        if target is None:
            raise UsageError(
                "renamed is given, and there is no target",
                remedy="rename in what load returns, or pass a target",
            )
        if any(True for _ in optimizer_dicts(target)):
            raise UsageError(
                "renamed is given, and the target has an optimizer's state",
                remedy="load the model alone with LoadOptions(renamed=); its optimizer starts anew",
            )

    @property
    def strict(self) -> bool:
        """Whether every name of the target must be saved."""
        return bool(self.keys)

    def asked(self, path: Path, tops: Sequence[str]) -> bool:
        """Whether a target with these top keys must take the value that was saved at `path`."""
        return self.keys != "target" and (not self.keys or _under(path, tops))

    @cached_property
    def storage(self) -> Storage:
        """The directory's store."""
        return self.access.open(self.directory)


@dataclass(frozen=True)
class LoadTarget:
    """The selected target and its selector, which may select it again; or the error. state_dict:
    None if the whole saved state is asked for."""

    state_dict: MutableMapping[str, Any] | None
    selector: Selector
    selection: Selection | None
    failure: Exception | None = None


@dataclass(frozen=True)
class LoadPlan:
    """What a rank reads, and into which tensors.

    selection: of `state_dict`, with the tensors that were made in it for saved state. objects:
    values that are not tensors, by key, to put into it; None if they are in it already. gathered:
    FULL state in it, with its path. agreed: what all ranks say of their plans together.
    """

    me: LoadingRank
    state_dict: MutableMapping[str, Any]
    selection: Selection
    objects: dict[str, tuple[Path, Any]] | None
    plan: ReadPlan
    memory: LoadMemory
    gathered: list[tuple[str, Any]]
    agreed: Common

    @property
    def catalogue(self) -> Catalogue:
        return self.me.catalogue


def plan_of(
    target: LoadTarget, catalogue: Catalogue, request: LoadRequest, group: Group
) -> LoadPlan:
    """What this rank reads.

    Raises:
        KeysMismatchError, TensorMismatchError, TopologyError, CorruptCheckpointError: the target
            cannot be filled.
        StateError: a value of others below the target's keys cannot be read without their code.
    """
    state_dict, selection = target.state_dict, target.selection
    live = request.options.parallel_state
    me = LoadingRank.of(catalogue, group.rank, group.ranks, group.world_size, live)
    by_key = state_dict is not None and catalogue.kind == "LOCAL"
    objects: dict[str, tuple[Path, Any]] | None = None
    settled: frozenset[Path] = frozenset()
    if state_dict is None:
        state_dict, tensors = whole_state(me, request.options.only)
        selection = target.selector.select(tensors)
    else:
        assert selection is not None  # otherwise all ranks have raised
        if request.keys is True:
            keys = [f"{top}." for top in state_dict]
            catalogue.refuse_unread(
                lambda name: not any(f"{name}.".startswith(key) for key in keys),
                'pass check_keys_matched="target" and a target without them',
            )
        if number_as_saved(state_dict, catalogue, me.saved, strict=request.strict):
            selection = target.selector.select(state_dict)
        objects = _values(me, selection, state_dict)
        renewed, settled = prepare_optimizers(state_dict, me, objects, strict=request.strict)
        made, read = make_read(state_dict, me, objects, grows=request.keys is True)
        renewed, settled = renewed or made, settled | read
        objects = {
            key: found
            for key, found in objects.items()
            if found[0][-1:] == (FACTS,) or not _is_under(found[0], settled)
        }
        if renewed:
            selection = target.selector.select(state_dict)
        match(selection.objects, objects, request.strict)
    by_key = by_key and selection.kind in ("LOCAL", None) and not request.options.renamed
    tops = tuple(sorted(map(str, state_dict)))
    if objects is not None and any(len(entry.path) == 1 for entry in selection.entries):
        tops = ("", *tops)  # tensors at the top are one part, called ""
    without = target.state_dict is None  # it leaves out what it has no room for
    asked = (lambda _: False) if without else partial(request.asked, tops=tops)
    plan = _read_plan(me, selection, asked, by_key, request, state_dict)
    plan = replace(plan, unexpected=()) if without else plan
    if objects is not None:
        if request.strict:
            objects = _asked_for(objects, tops, request, me)
        _check_objects(selection, objects, settled, request, me)
    memory = memory_of(selection, plan.copies, me.kinds or {}, partly=not request.strict)
    gathered: list[tuple[str, Any]] = []
    if selection.gathered:
        gathered = [(dotted(path), put) for path, put in gathered_parts(state_dict)]
    spare = _marked(plan.unexpected, catalogue) if plan.unexpected else ""
    options = request.options
    once = request.storage.read_once if options.read_once is None else options.read_once
    shares = once and not options.preverify and len(group.ranks) > 1 and sys.platform == "linux"
    agreed = Common(spare, tops, tuple(name for name, _ in gathered), shares)
    return LoadPlan(me, state_dict, selection, objects, plan, memory, gathered, agreed)


def _read_plan(
    me: LoadingRank,
    selection: Selection,
    asked: Callable[[Path], bool],
    by_key: bool,
    request: LoadRequest,
    state_dict: Any,
) -> ReadPlan:
    entries: Sequence[Entry] = selection.entries
    if request.options.renamed:
        entries = tuple(_as_saved(entry, request.options.renamed) for entry in entries)
    other: CheckpointError | None = None
    if by_key:  # each rank compares its keys with those of one saved rank
        try:
            plan = plan_local(me, entries, strict=request.strict, asked=asked)
        except (TopologyError, KeysMismatchError) as error:
            if selection.kind is not None:
                raise
            other = error  # of a target without a context, whose names may tell enough
        else:
            _say_left(plan.missing, plan.unexpected, request, me)
            return replace(plan, unexpected=())
    plan = plan_logical(me, entries)
    if request.strict and plan.missing:
        _refuse_numbered(state_dict, plan.unexpected, me)
        if other is not None:  # numbers of parameters, say, in an optimizer's own state dict
            raise other
        # A peer may ask for a name that this rank does not (`refuse_spare`). Without peers it is
        # refused now.
        spare = plan.unexpected if len(me.group) == 1 else ()
        spare = tuple(name for name in spare if asked(me.catalogue.logical[name].path))
        refuse_names(plan.missing, spare, me)
    _say_left(plan.missing, (), request, me)
    return plan


def unread(planned: LoadPlan, request: LoadRequest) -> Iterator[torch.Tensor]:
    """Tensors of the target that the checkpoint lacks, which a load that is not strict leaves."""
    if not planned.plan.missing:
        return
    missing = set(planned.plan.missing)
    for entry, tensor in zip(planned.selection.entries, planned.selection.tensors, strict=True):
        saved = _as_saved(entry, request.options.renamed) if request.options.renamed else entry
        if not missing.isdisjoint((saved.key, *map(saved.logical_name, saved.fqns))):
            yield tensor


def _as_saved(entry: Entry, renamed: Mapping[str, str]) -> Entry:
    """The entry with the names that its parameters have in the checkpoint."""

    def name(fqn: str) -> str:
        for ours, saved in renamed.items():
            if fqn == ours or fqn.startswith(f"{ours}."):
                return saved + fqn[len(ours) :]
        return fqn

    return replace(entry, geometry=entry.geometry.named(name))


def refuse_spare(planned: LoadPlan, agreed: Common, request: LoadRequest) -> None:
    """Refuse saved names that no rank of the load asks for. One rank need not have all names:
    pipeline stages hold different layers, and ranks may have tensors of their own. Names under a
    top key that no rank has were not asked for.

    Raises:
        KeysMismatchError: there are such names, and the load is strict.
    """
    catalogue = planned.catalogue
    logical = catalogue.logical
    spare = _unmarked(agreed.spare, catalogue)
    if request.strict:
        spare = tuple(name for name in spare if request.asked(logical[name].path, agreed.tops))
        _refuse_numbered(planned.state_dict, spare, planned.me)
        refuse_names((), spare, planned.me)
    _say_left((), spare, request, planned.me)


def _refuse_numbered(state: Any, spare: Sequence[str], me: LoadingRank) -> None:
    for path, tree, _ in optimizer_dicts(state) if spare else ():
        above = "".join(f"{key}." for key in path)
        numbered = all(type(key) is int for key in tree["state"])
        if numbered and any(name.startswith(f"{above}state.") for name in spare):
            raise KeysMismatchError(
                f"the state of {above[:-1] or 'the optimizer'} was saved by the names of its "
                "parameters, and the target has it by their numbers",
                remedy="take the target's state dicts inside sm_state_dict_type(model, "
                "smckpt.SHARDED), which names the parameters",
                **me.where,
            )


def _under(path: Path, tops: Sequence[str]) -> bool:
    """Whether one of the top keys holds the value that was saved at `path`. Tensors at the top are
    one part: a model's own state dict must be loaded whole."""
    return str(path[0]) in tops or (len(path) == 1 and "" in tops)


# -- values that are not tensors ----------------------------------------------------------------


def _asked_for(
    objects: dict[str, tuple[Path, Any]],
    tops: Sequence[str],
    request: LoadRequest,
    me: LoadingRank,
) -> dict[str, tuple[Path, Any]]:
    """The values under the target's top keys. One rank logs the other keys, also of tensors."""
    tensors = (tensor.path for tensor in me.catalogue.logical.values())
    left = {str(path[0]) for path in tensors if not _under(path, tops)}
    left |= {str(path[0]) for path, _ in objects.values()} - {*tops}
    if left and me.first and request.keys != "target" and request.options.only is None:
        names = ", ".join(sorted(left)[:12])
        log.warning(
            "not loaded from %s, because the target has no such keys: %s", request.directory, names
        )
    return {key: found for key, found in objects.items() if str(found[0][0]) in tops}


def _values(
    me: LoadingRank,
    selection: Selection,
    state_dict: MutableMapping[str, Any],
) -> dict[str, tuple[Path, Any]]:
    """The saved values, by the target's keys, with those in them made that are known by their
    classes. What the followed rank lacks comes from another one, because one rank may save a value
    for all."""
    own = me.objects(me.saved)
    tensors = {entry.key for entry in selection.entries}
    lacking = [leaf.path for leaf in selection.objects if leaf.key not in own]
    objects = me.values(lacking)
    objects = {key: one for key, one in objects.items() if key in own or key not in tensors}
    objects = named_as_target(state_dict, objects, me.catalogue.optimizers)
    tops = {*map(str, state_dict)}  # what is asked for; only that is made
    return {
        key: (path, made_again(value, key) if str(path[0]) in tops else value)
        for key, (path, value) in objects.items()
    }


def _is_under(path: Path, above: Collection[Path]) -> bool:
    return any(path[:length] in above for length in range(1, len(path) + 1))


def _check_objects(
    selection: Selection,
    objects: dict[str, tuple[Path, Any]],
    settled: Collection[Path],
    request: LoadRequest,
    me: LoadingRank,
) -> None:
    here = {
        leaf.key
        for leaf in selection.objects
        if leaf.path[-1:] != (FACTS,) and not _is_under(leaf.path, settled)
    }
    missing = sorted(here - objects.keys())
    extra = sorted(objects.keys() - here)
    if request.keys == "target":
        for leaf in selection.objects:
            missing += lacking_keys(leaf.value, objects.get(leaf.key, ((), None))[1], leaf.key)
        while extra:
            del objects[extra.pop()]
    if request.strict and (missing or extra):
        raise KeysMismatchError(
            f"values that are not tensors differ: missing in the checkpoint {missing[:8]}, "
            f"not in the target {extra[:8]}",
            remedy="give the target the same structure, or pass check_keys_matched=False",
            path=request.directory,
            rank=me.rank,
        )
    _say_left(missing, extra, request, me)


def _say_left(
    missing: Sequence[str], unexpected: Sequence[str], request: LoadRequest, me: LoadingRank
) -> None:
    """Log the names that a load with check_keys_matched=False skipped. Only one rank of a group
    logs them, since they are nearly the same on all."""
    if (missing or unexpected) and not request.keys:
        level = logging.WARNING if me.first else logging.INFO
        text = "not loaded from %s, as check_keys_matched=False allows: %s"
        log.log(level, text, request.directory, differing_names(missing, unexpected))


# -- names that this rank has no use for: one bit for each name of the checkpoint --------------


def _marked(names: Sequence[str], catalogue: Catalogue) -> str:
    chosen = set(names)
    bits = "".join("1" if name in chosen else "0" for name in sorted(catalogue.logical))
    return f"{int(bits, 2):x}"


def _unmarked(marks: str, catalogue: Catalogue) -> tuple[str, ...]:
    names = sorted(catalogue.logical)
    if not marks or int(marks, 16).bit_length() > len(names):  # a group that has other names
        return ()
    bits = f"{int(marks, 16):0{len(names)}b}"
    return tuple(name for name, bit in zip(names, bits, strict=True) if bit == "1")

"""Find a step whose parts are all written, and which nobody has committed: its coordinator died
between the parts and the manifest, or the lead between the manifests and the record.

Nothing is guessed. Which directories make the step is what a lease says, or the caller. A set of
parts is newer than what is committed if the leases say so. Where they do not tell, the step is
refused with the reason (`Refusal`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from smckpt.checkpoint.commits.choose import Commit, choose_commit
from smckpt.checkpoint.commits.leases import Lease, leases_at
from smckpt.checkpoint.reading.blocks import not_missing
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import Part, attempt_of, ours_among, parse_name, part_name
from smckpt.checkpoint.records.prefixes import is_prefix, spread_over
from smckpt.checkpoint.records.sealed import decode_body, read_body
from smckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, few
from smckpt.storage import Storage
from smckpt.storage.urls import join_url, parent_url, relative_url

_LEVELS = 16  # of directories above, in which a lease of several groups may be


@dataclass(frozen=True)
class UnfinishedSave:
    """The parts of one save in one directory.

    Args:
        subpath: the directory, relative to the step's.
        storage: of the directory and its ranks' files.
        token: the latest fencing token of its session here; 0 if the session took no lease.
        group_ranks: the ranks that were to write.
        absent: those of them that wrote no part.
        damage: why its parts cannot be read; "" if they can.
    """

    subpath: str
    storage: Storage = field(repr=False)
    session: str
    number: int
    token: int
    kind: str | None
    step: int | None
    group_ranks: tuple[int, ...]
    absent: tuple[int, ...]
    damage: str = ""

    @property
    def attempt(self) -> str:
        return attempt_of(self.session, self.number)

    def parts(self) -> dict[str, dict[str, str]]:
        """What the ranks would have reported: rank → name, checksum and host of its part.

        Raises:
            CorruptCheckpointError: a part is damaged or says something impossible, or one of its
                files is missing or has another size.
        """
        named = {}
        sizes = {info.name: info.size for info in self.storage.list("data-")}
        for rank in self.group_ranks:
            name = part_name(self.attempt, rank)
            with not_missing(self.storage.path_of(name)):
                part, data = read_whole_part(self.storage, name)
            for file in part.files:
                for found, size in file.sizes.items():
                    if sizes.get(found) != size:
                        there = f"has {sizes[found]} bytes" if found in sizes else "is missing"
                        raise CorruptCheckpointError(
                            f"{found} {there}; rank {part.rank} wrote {size} bytes",
                            remedy=_OLDER,
                            path=self.storage.path_of(found),
                        )
            named[str(rank)] = {"part": name, "crc64": hex64(crc64(data)), "host": part.host}
        return named


@dataclass(frozen=True)
class UnfinishedStep:
    """All parts of a step, one attempt for each group.

    Args:
        alone: it is one directory that is a checkpoint by itself.
        lead: the session that held the lease of the groups; "" if none did.
    """

    attempts: tuple[UnfinishedSave, ...]
    alone: bool
    lead: str = ""

    @property
    def step(self) -> int | None:
        return self.attempts[0].step

    @property
    def number(self) -> int:
        return self.attempts[0].number

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for one in self.attempts for rank in one.group_ranks))


@dataclass(frozen=True)
class Refusal:
    """Why what lies there is not committed, and what to do."""

    what: str
    remedy: str
    path: str


_OLDER = "no command can make what was never written: take an older step (`smckpt doctor` names it)"


def unfinished_step(
    top: Storage, groups: Sequence[str] | None = None
) -> UnfinishedStep | Refusal | None:
    """The newest step in a directory that has all parts and no commit.

    Args:
        groups: the directories of the step's groups, relative to `top`, where no lease names them.
            "." alone: the directory is a checkpoint by itself.

    Returns:
        None: nothing uncommitted is there. A refusal: something is, and it cannot be committed.

    Raises:
        StorageError, UsageError: the store failed, or a group's directory is a link.
    """
    leases = leases_at(top)
    last = leases[-1] if leases else None
    subpaths: tuple[str, ...] = ("",)
    if groups is not None:
        subpaths = tuple(sorted({"" if subpath == "." else subpath for subpath in groups}))
    elif last is not None:
        subpaths = tuple(sorted(relative_url(url, top.url) for url in last.scope))
    if subpaths != ("",):
        urls = {join_url(top.url, subpath) for subpath in subpaths}
        return _of_groups(top, subpaths, [lease for lease in leases if lease.scope == urls])
    found = attempts_at(top, "")
    if not found:
        return _groups_unknown(top)
    return _of_one(top, found, leases, named=groups is not None)


def attempts_at(storage: Storage, subpath: str) -> list[UnfinishedSave]:
    """The saves that left parts in a directory, newest first as far as numbers tell."""
    leases = [lease for lease in leases_at(storage) if storage.url in lease.scope]
    tokens = {lease.session: lease.fencing_token for lease in leases}  # oldest first
    found: dict[tuple[str, int], UnfinishedSave] = {}
    for spread in dict.fromkeys([None, *(lease.spread for lease in leases)]):
        files = spread_over(storage, [spread])
        wrote: dict[tuple[str, int], set[int]] = {}
        for one in ours_among(info.name for info in files.list("part-")):
            wrote.setdefault((one.session, one.number), set()).add(one.rank)
        for (session, number), ranks in wrote.items():
            name, token = part_name(attempt_of(session, number), min(ranks)), tokens.get(session, 0)
            with contextlib.suppress(CheckpointNotFoundError):  # deleted meanwhile
                try:
                    part, _ = read_whole_part(files, name)
                except CorruptCheckpointError as error:
                    found[session, number] = UnfinishedSave(
                        subpath, files, session, number, token,
                        None, None, (), (), str(error),
                    )  # fmt: skip
                    continue
                absent = tuple(rank for rank in part.group_ranks if rank not in ranks)
                found[session, number] = UnfinishedSave(
                    subpath, files, session, number, token,
                    part.kind, part.step, part.group_ranks, absent,
                )  # fmt: skip
    return sorted(found.values(), key=lambda one: (one.token, one.number), reverse=True)


def read_whole_part(storage: Storage, name: str) -> tuple[Part, bytes]:
    """A part and its bytes.

    Raises:
        CorruptCheckpointError: it is damaged, or does not say what its name says.
    """
    body, data = read_body(storage, name)
    return decode_body(Part, body, storage.path_of(name)), data


def newest_commit(storage: Storage) -> Commit | None:
    """The commit that counts in a directory; None without one, or if the newest is damaged: its
    parts may still be whole."""
    try:
        return choose_commit(storage)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None


# -- one directory ---------------------------------------------------------------------------------


def _of_one(
    top: Storage, found: Sequence[UnfinishedSave], leases: Sequence[Lease], *, named: bool
) -> UnfinishedStep | Refusal | None:
    commit = newest_commit(top)
    left = [one for one in found if not _is_of(commit, one)]
    last = next((lease for lease in reversed(leases) if top.url in lease.scope), None)
    newer = [one for one in left if _follows(one, last) and _newer(one, commit)]
    if not newer:
        return None  # what a sweep would delete
    free = [one for one in newer if not one.token] or newer  # those began after all leases
    if len({one.session for one in free}) > 1:
        return _several(newer, top)
    best = max(free, key=lambda one: one.number)
    if best.absent or best.damage:
        return _incomplete([best], top)
    if not named:
        above = _scope_above(top)
        if above is not None and above != "":
            return Refusal(
                "this is one group of a step, which is not a checkpoint without the other groups",
                f"pass the directory of the step, {above}",
                top.url,
            )
        if not best.token or above is None:
            return Refusal(
                "all parts are there, but no lease tells whether this directory is a checkpoint by "
                "itself, or one group of a step",
                f"if it is a checkpoint by itself: smckpt repair {top.url} --group . (else pass "
                "the directory of the step, and each group's with --group)",
                top.url,
            )
    return UnfinishedStep((best,), alone=True)


def _is_of(commit: Commit | None, one: UnfinishedSave) -> bool:
    """Whether a commit has committed this very attempt."""
    return commit is not None and any(
        directory == one.storage.url and (m.session, m.number) == (one.session, one.number)
        for directory, m in commit.manifests
    )


def _follows(one: UnfinishedSave, last: Lease | None) -> bool:
    """Whether no later session has taken a lease of the directory since this attempt's."""
    if last is None or last.session == one.session:
        return True
    return not one.token and one.session not in last.before


def _newer(one: UnfinishedSave, commit: Commit | None) -> bool:
    if commit is None:
        return True
    for directory, manifest in commit.manifests:
        if directory == one.storage.url and manifest.session == one.session:
            return one.number > manifest.number
    return not one.token or one.token > commit.order[0]


def _several(found: Sequence[UnfinishedSave], top: Storage) -> Refusal:
    names = ", ".join(sorted(one.attempt for one in found)[:4])
    return Refusal(
        f"several sessions left parts, and nothing tells which are newer: {names}",
        "delete the parts of the older session by hand, or take an older step",
        top.url,
    )


def _incomplete(found: Sequence[UnfinishedSave], top: Storage) -> Refusal:
    if damaged := [one.damage for one in found if one.damage]:
        return Refusal(damaged[0], _OLDER, top.url)
    values = [
        f"rank{'s' if len(one.absent) > 1 else ''} {few(one.absent, 8)}"
        + (f" of {one.subpath}" if one.subpath else "")
        for one in found
    ]
    return Refusal(f"the save is not complete: {'; '.join(values)} wrote no part", _OLDER, top.url)


def _scope_above(top: Storage) -> str | None:
    """The directory above whose lease names this one as one of several groups; "" where there is
    none; None where that cannot be told."""
    at = top.url
    for _ in range(_LEVELS):
        try:
            up = parent_url(at)
        except CheckpointError:  # a whole bucket
            return ""
        if up == at:
            return ""
        at = up
        try:
            if any(len(one.scope) > 1 and top.url in one.scope for one in leases_at(top.at(at))):
                return at
        except CheckpointError:  # no right to look, or somebody else's file
            return None
    return ""


def _groups_unknown(top: Storage) -> Refusal | None:
    """If directories below hold parts that may be the groups of one step, which no lease names."""
    wrote: dict[str, UnfinishedSave] = {}
    for name in top.list_dirs():
        if is_prefix(name):
            continue
        directory = top.join(name)
        if any(parse_name(info.name) is not None for info in directory.list("part-")):
            if newest_commit(directory) is not None:
                return None  # directories of steps, or of a step that is committed
            wrote[name] = attempts_at(directory, name)[0]
    ranks = [rank for one in wrote.values() for rank in one.group_ranks]
    if not wrote or len(set(ranks)) != len(ranks):
        return None
    return Refusal(
        f"parts are in {', '.join(wrote)}, but no lease tells which directories make the step",
        "if these are all groups of one step: smckpt repair "
        + " ".join([top.url, *(f"--group {name}" for name in wrote)]),
        top.url,
    )


# -- several groups --------------------------------------------------------------------------------


def _of_groups(
    top: Storage, subpaths: Sequence[str], leases: Sequence[Lease]
) -> UnfinishedStep | Refusal | None:
    lead = leases[-1].session if leases else ""
    ours = [lease for lease in leases if lease.session == lead]
    commits: dict[str, Commit | None] = {}
    by_group: list[dict[int, list[UnfinishedSave]]] = []
    for subpath in subpaths:
        storage = top.join(subpath)
        storage.refuse_links()
        commits[subpath] = newest_commit(storage)
        by_number: dict[int, list[UnfinishedSave]] = {}
        held = [lease for lease in leases_at(storage) if storage.url in lease.scope]
        for one in attempts_at(storage, subpath):
            # of the session that holds the step's leases, or of one that began after them
            of_ours = not (one.token and ours) or one.token in {o.fencing_token for o in ours}
            if of_ours and _follows(one, held[-1] if held else None):
                by_number.setdefault(one.number, []).append(one)
        by_group.append(by_number)
    numbers = sorted({number for group in by_group for number in group}, reverse=True)
    first: Refusal | None = None
    for number in numbers:
        here = [group.get(number, []) for group in by_group]
        chosen = [one for group in here for one in group[:1]]
        if any(_is_of(commits[one.subpath], one) for one in chosen) or not all(
            _newer(one, commits[one.subpath]) for one in chosen
        ):
            break  # this number is committed, or superseded, and so are lower ones
        refusal = _unfit(top, subpaths, here, ours)
        if refusal is None:
            return UnfinishedStep(tuple(chosen), alone=False, lead=lead)
        first = first or refusal
    return first


def _unfit(
    top: Storage,
    subpaths: Sequence[str],
    here: Sequence[Sequence[UnfinishedSave]],
    ours: Sequence[Lease],
) -> Refusal | None:
    """Why these attempts of one number do not make a step."""
    if empty := [subpath for subpath, group in zip(subpaths, here, strict=True) if not group]:
        return Refusal(
            f"the save is not complete: nothing of it is in {', '.join(empty[:8])}", _OLDER, top.url
        )
    for group in here:
        if len({one.session for one in group}) > 1:
            return _several(group, group[0].storage)
    chosen = [group[0] for group in here]
    if absent := [one for one in chosen if one.absent or one.damage]:
        return _incomplete(absent, top)
    for key in ("kind", "step"):
        values = {one.subpath: getattr(one, key) for one in chosen}
        if len(set(values.values())) > 1:
            return Refusal(f"the groups do not agree on the {key}: {values}", _OLDER, top.url)
    ranks = [rank for one in chosen for rank in one.group_ranks]
    if len(set(ranks)) != len(ranks):
        return Refusal("a rank is in two of the groups", _OLDER, top.url)
    last = ours[-1] if ours else None
    if last is not None and last.ranks and set(ranks) != last.ranks:
        away = sorted(last.ranks ^ set(ranks))[:8]
        return Refusal(
            f"the groups are not those of the lease {last.name}: it differs in ranks {away}",
            _OLDER,
            top.url,
        )
    tied = all(one.token in {lease.fencing_token for lease in ours} for one in chosen)
    if chosen[0].step is None and not tied:
        return Refusal(
            "nothing tells whether the groups' parts are of one step: they record no step, and "
            "not all groups hold a lease",
            _OLDER,
            top.url,
        )
    return None

"""Finds the ranks' files in the directories and single files that other trainers write."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.foreign import holds_dcp
from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UsageError,
    errors_at,
)
from smckpt.formats.boxes import ForeignCheckpoint
from smckpt.formats.names import ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN
from smckpt.formats.pickled import Inert
from smckpt.formats.readers.dcp import open_dcp, open_shards
from smckpt.formats.readers.deepspeed import (
    SMP_USER,
    open_smp_sharded,
    open_universal,
    open_zero3,
)
from smckpt.formats.readers.rank_files import hub_tensors, weight_files
from smckpt.formats.readers.torch_files import StoredState, stored_state, torch_root
from smckpt.formats.source_facts import (
    EP,
    PP,
    TP,
    SourceFacts,
    facts_of_state,
    yaml_beside,
)
from smckpt.formats.source_files import ArchiveRecord, Folder, SourceFiles, is_tar, open_tar
from smckpt.storage import Access
from smckpt.storage.urls import disk_path

# names of formats
HUB_DIRECTORY, PEFT_DIRECTORY = "a Hugging Face directory", "a directory of PEFT"
ONE_FILE = "one file"

_LATEST = "latest_checkpointed_iteration.txt"  # Megatron-LM's, above its iterations
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")  # tensor, pipeline, expert
_NEMO_RANK = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")
_MODEL = "model_optim_rng.pt"
_NEMO = "model_weights.ckpt"
_DEEPSPEED_LATEST = ("latest", "latest_universal")
_STEP = re.compile(r"global_step\d")
_DEEPSPEED = re.compile(r"mp_rank_\d+_model_states\.pt")
_STAGE = re.compile(r"layer_\d+-.*model_.*states\.pt")
_NEWEST, _PARTIAL = "newest", "_partial"  # SMP v1's, above its steps; behind their names
_SMP = re.compile(r"model_(\d+)_(\d+)\.pt")  # pipeline stage, tensor-parallel rank
_SMP_DEGREES = ("pipeline_parallel_degree", "tensor_parallel_degree")
# SMP v1's names that the tensor-parallel rank 0 alone holds: biases that are added once
_SMP_ALONE = re.compile(r".*\.(dense|dense2)\.bias")
_GIVEN = "files of ranks"  # in the order in which they were passed
_SHORT = 64 << 10  # bytes of a file with a name in it


@dataclass(frozen=True)
class RankFilesFound:
    """Files of ranks by name, tensor-parallel ranks innermost and pipeline stages outermost, the
    degrees in their names, and the name of the format. source: reads them. alone: what of a stage
    its first rank alone may hold; then the stages hold any parts of one model, by its names.
    beside: what a file beside them says of the model. prefix: the model's place in each, as in
    `stored_state`."""

    files: Mapping[str, ArchiveRecord]
    source: SourceFiles = field(compare=False)
    tp: int | None = None
    ep: int | None = None
    format: str = _GIVEN
    pp: int | None = None
    alone: re.Pattern[str] | None = None
    beside: SourceFacts | None = None
    prefix: str | None = None

    @cached_property
    def states(self) -> Mapping[str, StoredState]:
        """The state in each file."""
        return {
            file: stored_state(self.source, record, self.prefix)
            for file, record in self.files.items()
        }

    @property
    def whole(self) -> bool:
        """Whether it is one file with all that was saved."""
        return self.format in (ONE_FILE, PEFT_DIRECTORY)

    @property
    def order_is_known(self) -> bool:
        """Whether names, or what is in the files, tell which rank each is of."""
        ranks = [state.facts and state.facts.values.get("rank") for state in self.states.values()]
        named = self.format != _GIVEN or _numbers([*self.files]) is not None
        return named or len(set(ranks) - {None}) == len(ranks)

    @property
    def facts(self) -> tuple[SourceFacts, ...]:
        """What the first rank's file, and a file beside it, say of the model."""
        inside = next((state.facts for state in self.states.values()), None)
        return tuple(facts for facts in (inside, self.beside) if facts is not None)

    @property
    def step(self) -> int | None:
        """The training step that the first file records."""
        found = next((state.step for state in self.states.values()), None)
        return found if type(found) is int else None

    def degree(self, name: str) -> int | None:
        """A degree that the names of files tell, or else what is in them."""
        named = {TP: self.tp, PP: self.pp, EP: self.ep}.get(name)
        found = (facts.degree(name) for facts in self.facts)
        return named or next((degree for degree in found if degree is not None), None)

    @property
    def url(self) -> str:
        return next((record.path for record in self.files.values()), "")


def open_source(
    checkpoint: Any, access: Access | None = None
) -> RankFilesFound | ForeignCheckpoint | None:
    """Recognise a source that another program wrote by its content: the files of ranks (a list, one
    file, a directory of Megatron-LM or of PEFT), or a checkpoint in one directory or archive (also
    a directory of Hugging Face). None for a checkpoint of smckpt's, and for an unknown source.

    Raises:
        UsageError: a rank's file is missing.
        CorruptCheckpointError: the checkpoint is damaged or not whole.
    """
    source = SourceFiles(access)
    if not isinstance(checkpoint, (str, os.PathLike)):
        return RankFilesFound(_given([os.fspath(path) for path in checkpoint], source), source)
    root = find_source(os.fspath(checkpoint), source)
    if isinstance(root, ArchiveRecord):
        return RankFilesFound({root.path: root}, source, format=ONE_FILE)
    if root is None:
        return None
    if any(parse_name(name) for name in root.files):
        if root.packed or not holds_dcp(root.files):
            return None
        # a save that was never committed leaves DCP's checkpoint in the same directory as it was
        with suppress(CheckpointNotFoundError):
            choose_commit(source.access.open(root.url))
            return None
    packed = root.packed
    with errors_at(root.url):
        root = _iteration(root)
    with errors_at(root.url):
        found = (
            _megatron(root) or _nemo(root) or _deepspeed(root) or _smp(root) or open_dcp(root)
            or open_shards(root) or _hub_directory(root)
        )  # fmt: skip
        if found is None and packed:
            raise UsageError(
                "this archive of tar has no model that smckpt knows: it has "
                f"{sorted(root.files)[:8]} and the directories {list(root.folders)[:8]}",
                remedy="unpack it, and pass the model that is in it",
            )
    return found


def _hub_directory(folder: Folder) -> RankFilesFound | ForeignCheckpoint | None:
    """The weights in a directory of Hugging Face's, or of PEFT's.

    Raises:
        UsageError, CorruptCheckpointError: a file of the index is missing or damaged.
    """
    files, _ = weight_files(folder)
    if files:
        saved = {key.name: tensor for key, tensor in hub_tensors(folder).items()}
        sizes = {name: record.nbytes for name, record in files.items()}
        beside = {ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN} & folder.files.keys() - files.keys()
        return ForeignCheckpoint(
            folder.url, HUB_DIRECTORY, saved, folder.source, files=sizes,
            facts={"adapter": min(beside)} if beside else {}, parts=tuple(files.values()),
        )  # fmt: skip
    for name in (ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN):
        if name in folder.files:
            return RankFilesFound({name: folder.files[name]}, folder.source, format=PEFT_DIRECTORY)
    return None


def find_source(url: str, source: SourceFiles) -> Folder | ArchiveRecord | None:
    """What is there: a directory or an archive of tar; a file; None: nothing.

    Raises:
        UsageError: it is an archive that is compressed.
        CorruptCheckpointError: it is an archive that is damaged.
    """
    if (path := disk_path(url)) is not None:
        if os.path.isdir(path):
            return Folder(source, path)
        if not os.path.isfile(path):
            return None
        file = source.whole(path)
    else:
        folder = Folder(source, url)
        if folder.files or folder.folders:
            return folder
        try:
            file = source.whole(url.rstrip("/"))
        except CheckpointNotFoundError:
            return None
    return open_tar(source, file) if is_tar(source, file) else file


def _given(paths: Sequence[str], source: SourceFiles) -> dict[str, ArchiveRecord]:
    """
    Raises:
        UsageError: a file is missing or given twice, or they are not in the order of their numbers.
    """
    seen = set()
    for path in paths:
        with suppress(OSError):  # the error is raised when it is opened
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                raise UsageError(
                    "the file is passed for two ranks",
                    remedy="pass each rank's own file",
                    path=path,
                )
            seen.add((status.st_dev, status.st_ino))
    # Nothing in a file may say its rank: rank10 before rank2, as a shell sorts them, would give a
    # wrong model with the right shapes.
    numbers = _numbers(paths)
    if numbers is not None and list(numbers) != sorted(numbers):
        order = ", ".join(map(str, numbers[:16]))
        raise UsageError(
            f"the numbers in the files' names are in the order {order}",
            remedy="pass them in the order of ranks (ls -v sorts numbers)",
        )
    return {path: source.whole(disk_path(path) or path.rstrip("/")) for path in paths}


def _numbers(paths: Sequence[str]) -> tuple[int, ...] | None:
    """The one number in which the names differ; None: they do not differ in one number."""
    parts = [re.split(r"(\d+)", path) for path in paths]
    if len({(len(part), *part[::2]) for part in parts}) > 1:
        return None
    numbers = [tuple(map(int, part[1::2])) for part in parts]
    differ = [n for n in zip(*numbers, strict=True) if len(set(n)) > 1]
    return differ[0] if len(differ) == 1 else None


# -- DeepSpeed -------------------------------------------------------------------------------------


def _deepspeed(folder: Folder) -> RankFilesFound | ForeignCheckpoint | None:
    """The directory of DeepSpeed, or one of its steps."""
    # DeepSpeed's file in a directory names a step. A universal checkpoint may be all that is left
    # of the latest one.
    tags = {
        name: folder.read(name, _SHORT).decode(errors="replace").strip()
        for name in _DEEPSPEED_LATEST if name in folder.files
    }  # fmt: skip
    if tags:
        latest, tag = next(iter(tags.items()))
        step = next((t for t in tags.values() if t in folder.folders and t.startswith(tag)), None)
        if step is not None:
            with errors_at(folder.at(step).url):
                return _deepspeed_step(folder.at(step))
        elif any(map(_STEP.match, (tag, *folder.folders))):
            raise UsageError(
                f"{latest} names {tag!r}, which is missing",
                remedy="fetch it, or pass the directory of another step",
            )  # fmt: skip
    return _deepspeed_step(folder)


def _deepspeed_step(folder: Folder) -> RankFilesFound | ForeignCheckpoint | None:
    """Up to ZeRO stage 2, each tensor-parallel rank's file has the whole of its weights."""
    # a universal checkpoint has copies of stage 3's model_states
    parts = open_universal(folder) or open_zero3(folder)
    if parts is not None:
        return parts
    if any(map(_STAGE.fullmatch, folder.files)):
        raise UsageError(
            "this is a checkpoint of DeepSpeed in pipeline stages: each layer has files of its own",
            remedy="make a universal checkpoint (DeepSpeed's ds_to_universal.py), and pass that",
        )
    found = [name for name in folder.files if _DEEPSPEED.fullmatch(name)]
    if not found:
        return None
    lost = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(int(found[-1].split("_")[2]))]
    if missing := sorted(set(lost) - set(found)):
        raise UsageError(
            f"the files {missing[:4]} are missing", remedy="fetch the files of all ranks",
        )  # fmt: skip
    files = {name: folder.files[name] for name in found}
    return RankFilesFound(files, folder.source, len(found), format="DeepSpeed")


# -- SMP v1 ----------------------------------------------------------------------------------------


def _smp(folder: Folder) -> RankFilesFound | ForeignCheckpoint | None:
    """A partial checkpoint of SMP v1 from 1.10 on (Amazon's SageMaker model parallel), or the
    directory with `newest` above it."""
    if _NEWEST in folder.files:
        lines = folder.read(_NEWEST, _SHORT).decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line), "")
        if last.endswith(_PARTIAL):
            if last not in folder.folders:
                raise UsageError(
                    f"{_NEWEST} names {last!r}, which is missing",
                    remedy="fetch it, or pass the directory of another step",
                )  # fmt: skip
            with errors_at(folder.at(last).url):
                return _smp_partial(folder.at(last))
    return _smp_partial(folder)


def _smp_partial(folder: Folder) -> RankFilesFound | ForeignCheckpoint | None:
    """Each stage's ranks hold its part of the model."""
    if not folder.name.endswith(_PARTIAL):
        return None
    if (sharded := open_smp_sharded(folder)) is not None:
        return sharded
    found = [name for name in folder.files if _SMP.fullmatch(name)]
    degrees = [_smp_degrees(folder, name) for name in found]
    if not degrees or degrees[0] is None or None in degrees:
        return None
    pp, tp = degrees[0]
    missing = next((name for name in _smp_names(pp, tp) if name not in found), None)
    if missing or len(set(degrees)) > 1 or len(found) != pp * tp:
        what = f"{missing} is missing" if missing else "the files of the ranks are of several runs"
        raise UsageError(
            what, remedy="fetch the files of all ranks of one step, and of no other",
        )  # fmt: skip
    files = {name: folder.files[name] for name in _smp_names(pp, tp)}
    beside = None
    if (content := folder.files.get(SMP_USER)) is not None:
        with suppress(CheckpointError):  # the script's own values, of any kind
            root = torch_root(folder.source, content)
            beside = next(iter(facts_of_state(root, content.path)), None)
    return RankFilesFound(
        files, folder.source, tp, 1, "SMP v1, partial", pp, _SMP_ALONE, beside=beside
    )


def _smp_names(pp: int, tp: int) -> Iterator[str]:
    return (f"model_{p}_{t}.pt" for p in range(pp) for t in range(tp))


def _smp_degrees(folder: Folder, name: str) -> tuple[int, int] | None:
    """Pipeline- and tensor-parallel degree that a rank's file tells; None: it tells none."""
    root = torch_root(folder.source, folder.files[name])
    info = root.get("_smp_load_info") if isinstance(root, Mapping) else None
    if not isinstance(info, Mapping) or root.get("_smp_is_partial") is not True:
        return None
    pp, tp = (info.get(word) for word in _SMP_DEGREES)
    if type(pp) is not int or type(tp) is not int or pp < 1 or tp < 1:
        raise CorruptCheckpointError(
            f"{name} tells the degrees {pp!r} and {tp!r}",
            remedy="fetch the file again, or use another checkpoint",
        )  # fmt: skip
    return pp, tp


# -- Megatron-LM, and NeMo -------------------------------------------------------------------------


def _iteration(folder: Folder) -> Folder:
    """The latest iteration, where Megatron-LM's file in the directory names one."""
    if _LATEST not in folder.files:
        return folder
    latest = folder.read(_LATEST, _SHORT).decode(errors="replace").strip()[:64]
    if latest != "release" and not latest.isdecimal():
        raise CorruptCheckpointError(
            f"the file names no iteration, but {latest!r}",
            remedy="pass the directory of an iteration",
            path=folder.files[_LATEST].path,
        )
    found = latest if latest == "release" else f"iter_{int(latest):07d}"
    if found not in folder.folders:
        raise UsageError(
            f"{_LATEST} names {latest}, but {found} is missing",
            remedy=f"fetch {found}, or pass the directory of another iteration",
        )
    return folder.at(found)


def _megatron(folder: Folder) -> RankFilesFound | None:
    """Megatron writes the pipeline stage's number if there are stages, and the expert-parallel rank
    if there are several. If a name has one of the two, the run's arguments in the file say which
    one it is."""
    named = {n: match.groups() for n in folder.folders if (match := _RANK.fullmatch(n))}
    if any(_NEMO in folder.at(name).files for name in named):
        return None
    stages = True
    ranks = [rank for rank in map(folder.at, named) if _MODEL in rank.files]
    if any(second and not third for _, second, third in named.values()) and ranks:
        root = torch_root(folder.source, ranks[0].files[_MODEL])
        arguments = root.get("args") if isinstance(root, Mapping) else None
        if isinstance(arguments, Inert):
            stages = bool(arguments.field("pipeline_model_parallel_size", 2) > 1)
    found: list[tuple[tuple[int, int, int], str]] = []
    for name, (tp, second, third) in named.items():
        if third is None and not stages:
            second, third = None, second
        found.append(((int(tp), int(second or 0), int(third or 0)), name))
    return _of_ranks(
        folder, found, _MODEL, "Megatron-LM (mp_rank_XX)", next(iter(yaml_beside(folder)), None)
    )


def _nemo(folder: Folder) -> RankFilesFound | None:
    """What is in an archive of NeMo's, or was unpacked from one: a file of one rank, or each rank's
    in a directory. The stage's number is in the names if there are stages."""
    beside = next(iter(yaml_beside(folder)), None)
    if _NEMO in folder.files:
        files = {_NEMO: folder.files[_NEMO]}
        return RankFilesFound(files, folder.source, 1, 1, "NeMo", beside=beside)
    found: list[tuple[tuple[int, int, int], str]] = []
    for name in folder.folders:
        if match := _NEMO_RANK.fullmatch(name):
            found.append(((int(match[1]), int(match[2]), 0), name))
        elif (match := _RANK.fullmatch(name)) and match[2] is None:
            found.append(((int(match[1]), 0, 0), name))
    return _of_ranks(folder, found, _NEMO, "NeMo", beside)


def _of_ranks(
    folder: Folder, found: Sequence[tuple[tuple[int, int, int], str]], file: str, kind: str,
    beside: SourceFacts | None = None,
) -> RankFilesFound | None:  # fmt: skip
    """The file of each rank. found: (tensor, pipeline, expert) and the directory."""
    if not found:
        return None
    ranks: dict[tuple[int, int, int], str] = {}
    for rank, name in found:
        other = ranks.get(rank)
        if other is None or folder.find(f"{other}/{file}") is None:
            ranks[rank] = name
        elif folder.find(f"{name}/{file}") is not None:
            raise UsageError(
                f"{other} and {name} are of one rank", remedy="remove that of another run",
            )  # fmt: skip
    tp, pp, ep = (1 + max(rank[number] for rank in ranks) for number in range(3))
    files = {}
    for p in range(pp):
        for e in range(ep):
            for t in range(tp):
                path = (
                    f"{ranks.get((t, p, e)) or _named_like(ranks, t, p if pp > 1 else e, e)}/{file}"
                )
                record = folder.find(path) if (t, p, e) in ranks else None
                if record is None:
                    stage = f"stage {p}, " if pp > 1 else ""
                    raise UsageError(
                        f"the file of {stage}tensor-parallel rank {t}, expert-parallel rank {e} is "
                        "missing",
                        remedy=f"fetch {path} too",
                    )
                files[path] = record
    return RankFilesFound(files, folder.source, tp, ep, kind, pp, beside=beside)


def _named_like(ranks: Mapping[tuple[int, int, int], str], *numbers: int) -> str:
    """The directory of a rank that is missing, named as those of the others."""
    left = iter(numbers)
    name = next(iter(ranks.values()))
    return re.sub(r"\d+", lambda match: f"{next(left):0{len(match[0])}d}", name)

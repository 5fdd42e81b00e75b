"""Finds the ranks' files in the directories and single files that other trainers write."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt.checkpoint.format import parse_name
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.storage.urls import is_local, local_path
from smckpt.translate.dcp.directory import open_dcp
from smckpt.translate.dcp.shards import open_shards
from smckpt.translate.foreign import ForeignCheckpoint
from smckpt.translate.torch_files import load_inert

__all__ = ["RankFilesFound", "open_source"]

_LATEST = "latest_checkpointed_iteration.txt"  # Megatron-LM's, above its iterations
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")  # tensor, pipeline, expert
_MODEL = "model_optim_rng.pt"
_DEEPSPEED_LATEST = "latest"
_DEEPSPEED = re.compile(r"mp_rank_\d+_model_states\.pt")
_ZERO3 = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_STAGE = re.compile(r"layer_\d+-.*model_.*states\.pt")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class RankFilesFound:
    """Files of ranks, tensor-parallel ranks innermost and pipeline stages outermost, the degrees in
    their names, and the name of the format."""

    paths: Sequence[str | os.PathLike[str]]
    tp: int | None = None
    ep: int | None = None
    format: str = "files of ranks"
    pp: int | None = None


def open_source(checkpoint: Any) -> RankFilesFound | ForeignCheckpoint | None:
    """Recognise a source that another program wrote by its content: the files of ranks (a list, one
    file, a directory of Megatron-LM), or a checkpoint in one directory. None for a checkpoint of
    smckpt's, and for an unknown source.

    Raises:
        UsageError: a rank's file is missing.
        CorruptCheckpointError: the checkpoint is damaged or not whole.
    """
    if not isinstance(checkpoint, (str, os.PathLike)):
        return RankFilesFound(list(checkpoint))
    if not is_local(os.fspath(checkpoint)):
        return None
    path = Path(local_path(os.fspath(checkpoint)))
    if path.is_file():
        _refuse_tar(path)
        return RankFilesFound([path], format="one file")
    if not path.is_dir() or any(parse_name(name) for name in os.listdir(path)):
        return None
    path = _iteration(path)
    return _megatron(path) or _deepspeed(path) or open_dcp(path) or open_shards(path)


def _refuse_tar(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(512)
    if start[257:262] == b"ustar" or (path.suffix == ".nemo" and start[:2] == _GZIP):
        raise UsageError(
            "this is an archive of tar, as NeMo's .nemo is one",
            remedy=f"unpack it (tar -xf {path.name} -C DIR), and pass DIR, or the file "
            "model_weights.ckpt in it",
            path=str(path),
        )


def _deepspeed(path: Path) -> RankFilesFound | None:
    """The directory of DeepSpeed, or one of its steps: up to ZeRO stage 2, each tensor-parallel
    rank's file has the whole of its weights."""
    latest = path / _DEEPSPEED_LATEST
    if latest.is_file():
        tag = latest.read_text(errors="replace").strip()[:256]
        if "/" not in tag and (path / tag).is_dir():
            path = path / tag
    names = sorted(os.listdir(path))
    if any(map(_ZERO3.fullmatch, names)) or any(map(_STAGE.fullmatch, names)):
        raise UsageError(
            "this is a checkpoint of DeepSpeed, in ZeRO stage 3 or pipeline stages: the weights "
            "are in parts that smckpt does not join",
            remedy="run DeepSpeed's own zero_to_fp32.py, which is in the directory above, and pass "
            "the files that it writes",
            path=str(path),
        )
    found = [name for name in names if _DEEPSPEED.fullmatch(name)]
    if not found:
        return None
    lost = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(int(found[-1].split("_")[2]))]
    if missing := sorted(set(lost) - set(found)):
        raise UsageError(
            f"the files {missing[:4]} are missing", remedy="fetch the files of all ranks",
            path=str(path),
        )  # fmt: skip
    return RankFilesFound([path / name for name in found], len(found), format="DeepSpeed")


def _iteration(path: Path) -> Path:
    """The latest iteration, where Megatron-LM's file in the directory names one."""
    latest = path / _LATEST
    if not latest.is_file():
        return path
    said = latest.read_text(errors="replace").strip()[:64]
    if said != "release" and not said.isdigit():
        raise CorruptCheckpointError(
            f"the file names no iteration, but {said!r}",
            remedy="pass the directory of an iteration",
            path=str(latest),
        )
    found = path / (said if said == "release" else f"iter_{int(said):07d}")
    if not found.is_dir():
        raise UsageError(
            f"{_LATEST} names {said}, but {found.name} is missing",
            remedy=f"fetch {found.name}, or pass the directory of another iteration",
            path=str(path),
        )
    return found


def _megatron(path: Path) -> RankFilesFound | None:
    ranks = _ranks(path)
    if not ranks:
        return None
    tp, pp, ep = (1 + max(rank[number] for rank in ranks) for number in range(3))
    paths = []
    for p in range(pp):
        for e in range(ep):
            for t in range(tp):
                file = ranks.get((t, p, e), path / f"mp_rank_{t:02d}") / _MODEL
                if (t, p, e) not in ranks or not file.is_file():
                    stage = f"stage {p}, " if pp > 1 else ""
                    raise UsageError(
                        f"the file of {stage}tensor-parallel rank {t}, expert-parallel rank {e} is "
                        "missing",
                        remedy=f"fetch {file.relative_to(path)} too",
                        path=str(path),
                    )
                paths.append(file)
    return RankFilesFound(paths, tp, ep, "Megatron-LM (mp_rank_XX)", pp)


def _ranks(path: Path) -> dict[tuple[int, int, int], Path]:
    """(tensor, pipeline, expert) → directory. Megatron writes the pipeline stage's number if there
    are stages, and the expert-parallel rank if there are several. If a name has one of the two, the
    run's arguments in the file say which one it is."""
    found = {}
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        match = _RANK.match(entry.name)
        if match and entry.is_dir():
            tp, second, third = match.groups()
            if third is None and second is not None and not _has_stages(entry / _MODEL):
                second, third = None, second
            found[int(tp), int(second or 0), int(third or 0)] = entry
    return found


def _has_stages(file: Path) -> bool:
    if not file.is_file():
        return True
    arguments = vars(load_inert(file).get("args", object)).get("pipeline_model_parallel_size", 2)
    return bool(arguments > 1)

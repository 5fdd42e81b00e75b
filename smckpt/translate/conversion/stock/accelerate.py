"""A directory as accelerate's own `save_state` writes it."""

from __future__ import annotations

import io
import re
import zipfile

from smckpt.errors import CorruptCheckpointError
from smckpt.translate.archives.new_target import NewTarget
from smckpt.translate.conversion.stock.format import StockFormat
from smckpt.translate.conversion.stock.optimizers import numbered
from smckpt.translate.conversion.stock.sharded import is_sharded, write_sharded
from smckpt.translate.conversion.whole_state import WholeState

__all__ = ["FORMAT"]

_PREPARED = re.compile(r"(model|optimizer)(_\d+)?")


def _write(whole: WholeState, target: NewTarget) -> tuple[str, ...]:
    changed: list[str] = []
    for key in sorted(whole.keys):
        found = _PREPARED.fullmatch(key)
        if found is None:
            continue
        kind, number = found[1], found[2] or ""
        if is_sharded(whole, "model" + number):
            changed += write_sharded(whole, key, target, int(number[1:] or 0))
            continue
        state = whole.nested(key)
        # accelerate takes tied weights twice from a file of torch.save, and not of safetensors
        name = f"pytorch_model{number}.bin" if kind == "model" else f"optimizer{number}.bin"
        with target.file(name) as file:
            whole.write_torch(file, state if kind == "model" else numbered(state))
    for name, data in _files(whole).items():
        target.put(name, data)
    return tuple(changed)


def _files(whole: WholeState) -> dict[str, bytes]:
    """What accelerate itself wrote on each rank: schedulers, samplers, random numbers, scaler,
    registered objects."""
    found: dict[str, bytes] = {}
    for rank in reversed(whole.catalogue.object_ranks):  # the main process writes what all share
        one = whole if rank == whole.rank else whole.of_rank(rank)
        for packed in (one.values[("own_files",)], one.values[("files",)]):
            try:
                with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                    for name in archive.namelist():
                        if ".." not in name.split("/") and not name.startswith("/"):
                            found[name] = archive.read(name)
            except (zipfile.BadZipFile, TypeError) as error:
                raise CorruptCheckpointError(
                    f"what accelerate wrote on rank {rank} cannot be read: {error}",
                    remedy="use an older checkpoint", path=whole.catalogue.url,
                ) from error  # fmt: skip
    return found


FORMAT = StockFormat("SmckptAccelerator", frozenset({"files", "own_files"}), _write)

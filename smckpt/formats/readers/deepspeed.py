"""DeepSpeed's checkpoints in parts: ZeRO stage 3, and universal ones; and SMP v1's, whose sharded
data parallelism is built on stage 3.

In stage 3, each of n ranks has ceil(size / n) elements of each flat parameter, one behind the other
in the flat groups of its optimizer, in float32; the last part is padded. This is the rule that
DeepSpeed's public zero_to_fp32.py follows, and sharded_data_parallel_checkpoint.py of Amazon's
examples (aws/amazon-sagemaker-examples, commit c2ad9da, beside gpt-j). In a universal checkpoint
each parameter is a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.formats.boxes import ForeignCheckpoint, SavedBox, SavedTensor, whole_tensor
from smckpt.formats.readers.torch_files import torch_root
from smckpt.formats.source_facts import TP, facts_of_state
from smckpt.formats.source_files import Folder
from smckpt.formats.torch_archive import StoredTensor
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import boxes_of_range, row_major_strides

_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ZERO, _FP32 = "zero", "fp32.pt"
_SMP_MODEL = re.compile(r"model_(\d+)\.pt")
_SMP_OPTIMIZER = re.compile(r"optimizer_(\d+)\.pt")
_SMP_CONFIG, SMP_USER = "smp_config.pt", "user_content.pt"
_SMP_CUTS = ("tensor_parallel_degree", "pipeline_parallel_degree")


class _Part(NamedTuple):
    """Elements [start, stop) of a flat parameter: those from `at` on of a stored tensor."""

    start: int
    stop: int
    stored: StoredTensor
    at: int


def open_zero3(folder: Folder) -> ForeignCheckpoint | None:
    """The weights of a step that was trained in ZeRO stage 3, in float32 as its optimizer has them;
    frozen ones and buffers in their own dtype. None: it is no such step.

    Raises:
        UsageError: a rank's file is missing; its weights are cut further.
        CorruptCheckpointError: the files of the ranks are not of one model.
    """
    models = _of_ranks(folder, _MODEL)
    if not models:
        return None
    optimizers = _of_ranks(folder, _OPTIMIZER)
    _refuse_missing(models, optimizers)
    states = [_root(folder, models[rank]) for rank in range(len(models))]
    groups, steps = [], []
    for rank in range(len(models)):
        state = _root(folder, optimizers[rank]).get("optimizer_state_dict")
        groups.append(_flat_groups(optimizers[rank], state, len(models)))
        steps.append((states[rank].get("global_steps"), _step_of(folder, state)))
        if steps[rank] != steps[0]:
            _bad(f"{optimizers[rank]} is of another step than {optimizers[0]}")
    names = [*models.values(), *optimizers.values()]
    return _of_parts(folder, "DeepSpeed, ZeRO stage 3", states, groups, names)


def open_smp_sharded(folder: Folder) -> ForeignCheckpoint | None:
    """The weights of SMP v1's sharded data parallelism, as `open_zero3`. Their names and shapes are
    in what the training script saved beside them. None: it is no such directory.

    Raises:
        UsageError: a rank's file is missing, or what tells names and shapes; its weights are cut
            further.
        CorruptCheckpointError: the files are not of one model.
    """
    models = _of_ranks(folder, _SMP_MODEL)
    if 0 not in models or _root(folder, models[0]).get("_smp_zero2d") is not True:
        return None
    optimizers = _of_ranks(folder, _SMP_OPTIMIZER)
    _refuse_missing(models, optimizers)
    for name in (_SMP_CONFIG, SMP_USER):
        if name not in folder.files:
            raise UsageError(
                f"{name} is missing, which SMP writes beside the ranks' files",
                remedy="fetch it too",
            )  # fmt: skip
    config, user_content = _root(folder, _SMP_CONFIG), _root(folder, SMP_USER)
    if cuts := {word: config.get(word) for word in _SMP_CUTS if config.get(word) != 1}:
        raise UsageError(
            f"the weights are cut by sharded data parallelism and further, by {cuts}, and how SMP "
            "writes that is not public",
            remedy="join it with SMP's own sharded_data_parallel_checkpoint",
        )  # fmt: skip
    if lacking := {"param_shapes", "buffer_names"} - user_content.keys():
        raise UsageError(
            f"{SMP_USER} has no {sorted(lacking)}, so nothing says which weights the parts are",
            remedy="save once more, with both in user_content= as Amazon's training scripts do "
            "(get_param_shapes, get_buffer_names); later versions of SMP add them by themselves",
        )
    state = {**user_content, "module": _root(folder, models[0]).get("module")}
    groups = [
        _flat_groups(optimizers[rank], _root(folder, optimizers[rank]), len(models))
        for rank in range(len(models))
    ]
    names = [*models.values(), *optimizers.values(), _SMP_CONFIG, SMP_USER]
    states = [state] * len(models)
    return _of_parts(folder, "SMP v1, sharded data parallelism", states, groups, names)


def open_universal(folder: Folder) -> ForeignCheckpoint | None:
    """The weights of a universal checkpoint, which DeepSpeed's ds_to_universal.py writes; None: it
    is none.

    Raises:
        CorruptCheckpointError: a file of it is damaged.
    """
    parameters = folder.at(_ZERO) if _ZERO in folder.folders else None
    files = {
        f"{_ZERO}/{name}/{_FP32}": (name, record)
        for name in (() if parameters is None else parameters.folders)
        if parameters is not None and (record := parameters.at(name).files.get(_FP32))
    }
    if not files:
        return None
    models = _of_ranks(folder, _MODEL)
    states = [_root(folder, models[rank]) for rank in sorted(models)]  # made from stage 3
    saved: dict[str, SavedTensor] = {}
    try:
        shapes = _shapes(states[0]) if states else {}
        for file, (name, record) in files.items():
            root = torch_root(folder.source, record)
            stored = root.get("param") if isinstance(root, Mapping) else root
            if not isinstance(stored, StoredTensor):
                _bad(f"{file} has no tensor")
            if stored is root:  # of stage 3: flat
                shape = _checked(name, shapes.get(name))
                if stored.shape != (math.prod(shape),) or stored.strides != (1,):
                    _bad(f"{file} has the shape {stored.shape}, but {name} has {shape}")
                stored = replace(stored, shape=shape, strides=row_major_strides(shape))
            saved[name] = whole_tensor((name,), stored)
        if states:
            saved |= _beside(states, saved)
    except (LookupError, TypeError, AttributeError) as error:
        _bad(f"a file lacks what DeepSpeed writes ({type(error).__name__}: {error})")
    sizes = {file: record.nbytes for file, (_, record) in files.items()}
    return ForeignCheckpoint(
        folder.url, "DeepSpeed, universal checkpoint", saved, folder.source, files=sizes,
        model_facts=facts_of_state(states[0], folder.files[models[0]].path) if states else (),
    )  # fmt: skip


def _of_parts(
    folder: Folder, kind: str, states: Sequence[Mapping[str, Any]],
    groups: Sequence[list[StoredTensor]], names: Sequence[str],
) -> ForeignCheckpoint:  # fmt: skip
    """states: of each rank, what tells names and shapes. groups: of each rank, its flat groups."""
    try:
        shapes = _shapes(states[0])
        if any(_shapes(state) != shapes for state in states):
            _bad("the ranks' files name different parameters or shapes")
        saved: dict[str, SavedTensor] = {}
        at = 0
        for name, shape in shapes.items():
            count = -(-math.prod(_checked(name, shape)) // len(states))
            parts = [list(_taken(flat, at, at + count)) for flat in groups]
            saved[name] = _tensor(name, shape, count, parts)
            at += count
        held = {sum(flat.shape[0] for flat in rank) for rank in groups}
        if held != {at}:
            _bad(f"the parameters have {at} elements of each rank, but the groups {held}")
        saved |= _beside(states, saved)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        _bad(f"a rank's file lacks what belongs there ({type(error).__name__}: {error})")
    files = {name: folder.files[name].nbytes for name in names}
    facts = facts_of_state(states[0], folder.files[names[0]].path)
    for found in facts:
        if (ranks := found.degree(TP) or 1) > 1:
            raise UsageError(
                f"{found.of} say {TP}={ranks}, but there are files of one tensor-parallel rank",
                remedy="make a universal checkpoint of all ranks' files (DeepSpeed's "
                "ds_to_universal.py), and pass that",
                path=found.where,
            )
    return ForeignCheckpoint(folder.url, kind, saved, folder.source, files=files, model_facts=facts)


def _refuse_missing(models: Mapping[int, str], optimizers: Mapping[int, str]) -> None:
    if missing := sorted(set(models) ^ set(optimizers) | set(range(len(models))) - set(models)):
        raise UsageError(
            f"of the ranks {missing[:8]}, the model's or the optimizer's file is missing; both are "
            "needed",
            remedy="fetch the files of all ranks",
        )  # fmt: skip


def _of_ranks(folder: Folder, pattern: re.Pattern[str]) -> dict[int, str]:
    """Data-parallel rank → file."""
    found: dict[int, str] = {}
    for name in folder.files:
        if match := pattern.fullmatch(name):
            if match.lastindex == 2 and int(match[2]):
                raise UsageError(
                    f"{name}: the weights are cut by ZeRO stage 3 and over tensor-parallel ranks",
                    remedy="make a universal checkpoint (DeepSpeed's ds_to_universal.py), and pass "
                    "that",
                )
            if (other := found.setdefault(int(match[1]), name)) != name:
                raise UsageError(
                    f"{other} and {name} are of one rank", remedy="remove that of another run",
                )  # fmt: skip
    return found


def _root(folder: Folder, name: str) -> Mapping[str, Any]:
    root = torch_root(folder.source, folder.files[name])
    if not isinstance(root, Mapping):
        _bad(f"{name} holds a {type(root).__name__}")
    return root


def _flat_groups(name: str, state: Any, ranks: int) -> list[StoredTensor]:
    """state: an optimizer's."""
    if not isinstance(state, Mapping):
        _bad(f"{name} has no optimizer_state_dict")
    count = state.get("partition_count")
    counts = count if isinstance(count, list) else [count]
    if not counts or any(n != ranks for n in counts):
        raise UsageError(
            f"{name} is of {count} ranks, but there are files of {ranks}",
            remedy="fetch the files of all ranks of one step",
        )  # fmt: skip
    groups = state.get("fp32_flat_groups")
    if not isinstance(groups, list) or not all(
        isinstance(flat, StoredTensor) and len(flat.shape) == 1 and flat.strides == (1,)
        for flat in groups
    ):
        _bad(f"{name} has no fp32_flat_groups of flat tensors")
    return groups


def _step_of(folder: Folder, state: Any) -> Any:
    """The step that the first parameter's state in an optimizer of stage 3 says, in any form."""
    for key in ("optimizer_state_dict", "state"):
        state = found if isinstance(found := state.get(key), Mapping) else {}
    step = next((one.get("step") for one in state.values() if isinstance(one, Mapping)), None)
    if isinstance(step, StoredTensor) and not step.shape:
        record, size = step.record, DTYPES[step.dtype].itemsize
        return folder.source.read(record, step.start * size, (step.start + 1) * size)
    return step if isinstance(step, (int, float)) else None


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that were trained, in the order in which they are in the flat groups."""
    return {name: shape for group in state["param_shapes"] for name, shape in group.items()}


def _beside(
    states: Sequence[Mapping[str, Any]], trained: Mapping[str, SavedTensor]
) -> dict[str, SavedTensor]:
    """Buffers, frozen parameters, and further names of parameters."""
    first = states[0]
    saved = {
        name: whole_tensor((name,), first["module"][name])
        for name in first["buffer_names"] or ()
        if isinstance(first["module"].get(name), StoredTensor)
    }
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        count = -(-math.prod(_checked(name, shape)) // len(states))
        parts = [
            list(_taken([state["frozen_param_fragments"][name]], 0, count)) for state in states
        ]
        saved[name] = _tensor(name, shape, count, parts)
    for name, other in (first.get("shared_params") or {}).items():
        known = saved.get(other) or trained.get(other)
        if known is not None and name not in trained:
            saved[name] = replace(known, name=name, path=(name,))
    return saved


def _checked(name: str, shape: Any) -> Shape:
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        _bad(f"{name} has the shape {shape!r}")
    return shape


def _taken(flat: Sequence[StoredTensor], low: int, high: int) -> Iterator[_Part]:
    """Elements [low, high) of flat tensors, one behind the other, counted from `low`."""
    begin = 0
    for stored in flat:
        end = begin + stored.shape[0]
        start, stop = max(low, begin), min(high, end)
        if start < stop:
            yield _Part(start - low, stop - low, stored, stored.start + start - begin)
        begin = end


def _tensor(name: str, shape: Shape, count: int, parts: Sequence[Sequence[_Part]]) -> SavedTensor:
    """parts: of each rank, in `count` elements of the flat parameter."""
    numel = math.prod(shape)
    boxes: list[SavedBox] = []
    dtypes = {part.stored.dtype for rank in parts for part in rank}
    if len(dtypes) > 1:
        _bad(f"{name} has the dtypes {sorted(dtypes)}")
    for rank, own in enumerate(parts):
        for part in own:
            start, stop = (min(rank * count + n, numel) for n in part[:2])
            at = part.at
            for box in boxes_of_range(shape, start, stop):
                strides = row_major_strides(box.sizes)
                stored = StoredTensor(part.stored.dtype, box.sizes, strides, at, part.stored.record)
                boxes.append(SavedBox.of(box, stored))
                at += box.numel
    return SavedTensor(name, (name,), next(iter(dtypes), "float32"), shape, tuple(boxes))


def _bad(what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"this is no whole checkpoint in parts: {what}",
        remedy="fetch the files of all ranks of one step, or use another checkpoint",
    )

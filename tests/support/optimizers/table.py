"""Which optimizers resume exactly: through torch's own pair of methods, and through smckpt.

    ./dev optimizers           try every one that is installed, write docs/evidence/optimizers.md
    ./dev optimizers WORD …    those whose name contains one of these, under the wrappers that are
                               named (plain, DDP, FSDP1, FSDP2, Trainer); the table is printed

A cell trains two steps, saves, loads into a fresh model and a fresh optimizer, and trains two more.
It is right if all weights are, bit for bit, those of a run without the save in between. `Trainer`
is that of transformers, with each name of `optim=` (`trainer_optimizers`). Each row is printed on
stderr as soon as it is known.
"""

from __future__ import annotations

import copy
import faulthandler
import fcntl
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.optimizers import trainer as trainer_optimizers
from tests.support.optimizers.people import everyone, net, step

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "evidence" / "optimizers.md"
BEGIN = "<!-- written by ./dev optimizers -->\n"
END = "<!-- end of what ./dev optimizers wrote -->"
FORMS = ("stock", "object", "LOCAL", "SHARDED", "FULL")
WRAPPERS = {"plain": 1, "DDP": 2, "FSDP1": 2, "FSDP2": 2}
TRAINER = "Trainer"
MARKS = {"exact": "=", "differs": "≠", "refused": "r", "untrained": "·"}


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if how == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            if next(layer.parameters(), None) is not None:
                fully_shard(layer)
        fully_shard(model)
    return model


def trained(name: str, how: str, seed: int, steps: Iterable[int]) -> tuple[nn.Module, Any]:
    wide = name.startswith(("torchao", "bitsandbytes"))
    model = wrapped(net(seed, wide=wide), how)
    optimizer = everyone(name)[name](model)
    for number in steps:
        step(model, optimizer, number)
    return model, optimizer


def bits(model: nn.Module) -> list[Any]:
    found = []
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        found.append(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found


def of_stock(optimizer: Any) -> Any:
    """Its own dict. torch's ZeroRedundancyOptimizer gives one on one rank, once all have sent their
    parts."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()
    optimizer.consolidate_state_dict(to=0)
    boxed = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(boxed, src=0)
    return boxed[0]


def taken(model: nn.Module, optimizer: Any, form: str) -> dict[str, Any]:
    import smckpt

    if form == "object" and type(model).__name__ != "FullyShardedDataParallel":
        return {"model": model, "optimizer": optimizer}
    kind = smckpt.LOCAL if form == "object" else getattr(smckpt, form)
    with smckpt.sm_state_dict_type(model, kind):
        given = optimizer if form == "object" else optimizer.state_dict()
        return {"model": model.state_dict(), "optimizer": given}


def cell(name: str, how: str, form: str, wanted: list[Any], folder: Path) -> str:
    """ "exact", "differs", "refused: why" (at the save), or "fails: why" (at the load)."""
    import smckpt

    model, optimizer = trained(name, how, 0, (0, 1))
    weights = [copy.deepcopy(p.detach()) for p in model.parameters()]
    saved = io.BytesIO()
    try:
        if form == "stock":
            torch.save(of_stock(optimizer), saved)
        else:
            smckpt.save(taken(model, optimizer, form), checkpoint_id=folder)
    except Exception as error:
        return f"refused: {error}"
    try:
        other, fresh = trained(name, how, 1, ())
        if form == "stock":
            saved.seek(0)
            fresh.load_state_dict(torch.load(saved, weights_only=False))
            with torch.no_grad():
                for mine, theirs in zip(other.parameters(), weights, strict=True):
                    mine.copy_(theirs)
        else:
            smckpt.load(taken(other, fresh, form), checkpoint_id=folder)
        for number in (2, 3):
            step(other, fresh, number)
    except Exception as error:
        return f"fails: {type(error).__name__} {error}"
    return "exact" if bits(other) == wanted else "differs"


def cells(
    names: Sequence[str], how: str, forms: Sequence[str], folder: str, tell: str = os.devnull
) -> dict[str, dict[str, str]]:
    """Name → form → what happened, on any rank. Rank 0 notes each in `folder` at once, and tells
    each row in the file `tell`."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        found[name] = {}
        for form, result in _row(name, how, forms, Path(folder) / f"{names.index(name)}"):
            found[name][form] = result
            if dist.is_initialized() and dist.get_rank() == 0:
                Path(folder, "rows.json").write_text(json.dumps(found))
        if not dist.is_initialized() or dist.get_rank() == 0:
            say(tell, f"{how}: {name}: {marks(found[name])}")
    return found


def say(tell: str, line: str) -> None:
    with open(tell, "a") as file:
        print(line, file=file)


def marks(row: dict[str, str]) -> str:
    return " ".join(MARKS.get(each.split(":")[0], "✗") for each in row.values())


def _limited() -> None:
    """End this rank if the next cell does not end: it may wait for one that failed."""
    if dist.is_initialized():
        faulthandler.dump_traceback_later(seconds(60), exit=True)


def _row(name: str, how: str, forms: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    _limited()
    try:
        wanted = bits(trained(name, how, 0, range(4))[0])
        again = bits(trained(name, how, 0, range(4))[0]) == wanted
        reason = "exact" if again else "untrained: it draws other numbers in each run"
    except Exception as error:
        wanted, reason = [], f"untrained: {type(error).__name__} {error}"
    reason = _everywhere(reason)
    for form in forms:
        _limited()
        result = reason
        if reason == "exact":
            result = _everywhere(cell(name, how, form, wanted, folder / form))
        yield form, result
    if dist.is_initialized():
        faulthandler.cancel_dump_traceback_later()


def _everywhere(result: str) -> str:
    """What happened on the first rank where it was not exact."""
    if not dist.is_initialized():
        return result
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, result)
    return next((each for each in everywhere if each != "exact"), "exact")


def table(
    names: Sequence[str],
    wrappers: Sequence[str] = tuple(WRAPPERS),
    forms: Sequence[str] = FORMS,
    tell: str = os.devnull,
) -> dict[str, dict[str, dict[str, str]]]:
    """Wrapper → name → form → what happened. Ranks try one optimizer after the other. If they die,
    those that they have not tried get new ranks. Each row is written to the file `tell`."""
    out: dict[str, dict[str, dict[str, str]]] = {}
    for how in wrappers:
        out[how] = {}
        say(tell, f"{how}: {len(names)} optimizers, {WRAPPERS[how]} rank(s)")
        waiting = list(names)
        while waiting:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    if WRAPPERS[how] == 1:
                        found = cells(waiting, how, forms, folder, tell)
                    else:
                        limit = 60 + 30 * len(waiting)
                        found = run_ranks(
                            cells, WRAPPERS[how], waiting, how, forms, folder, tell, timeout=limit
                        )[0]
                except AssertionError as error:
                    notes = Path(folder, "rows.json")
                    found = json.loads(notes.read_text()) if notes.exists() else {}
                    whole = [name for name, row in found.items() if len(row) == len(forms)]
                    last = waiting[len(whole)]
                    row = found.setdefault(last, {})
                    died = "fails" if row else "untrained"
                    found[last] = row | {f: f"{died}: {error}" for f in forms if f not in row}
                    say(tell, f"{how}: {last}: {marks(found[last])} (the ranks died)")
            out[how] |= found
            waiting = [name for name in waiting if name not in found]
    return out


def losses(found: dict[str, dict[str, dict[str, str]]]) -> list[str]:
    """The cells in which stock resumes and smckpt does not."""
    return [
        f"{name}, {how}, {form}: {result}"
        for how, rows in found.items()
        for name, row in rows.items()
        for form, result in row.items()
        if form != "stock" and row.get("stock") == "exact" and result != "exact"
    ]


def written(found: dict[str, dict[str, dict[str, str]]]) -> str:
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    versions = {name.split(":")[0].split(".")[0] for name in names}
    shown = ", ".join(f"{each} {metadata.version(each)}" for each in sorted(versions))
    lines = [
        f"Tried with {shown}. In a cell: {', '.join(FORMS)}; of the Trainer, its own and smckpt's."
    ]
    for wrappers in ([how for how in found if how != TRAINER], [TRAINER]):
        rows = [name for name in names if any(name in found.get(how, ()) for how in wrappers)]
        if rows:
            lines += [
                "",
                f"| optimizer | {' | '.join(wrappers)} |",
                f"|---|{'---|' * len(wrappers)}",
            ]
        for name in rows:
            cells_of_row = (marks(found[how].get(name, {})) for how in wrappers)
            lines.append(f"| {name} | {' | '.join(cells_of_row)} |")
    lines += ["", "Where stock resumes and smckpt does not:", ""]
    lines += [f"- {each}" for each in dict.fromkeys(map(_short, losses(found)))] or ["- none"]
    return "\n".join(lines) + "\n"


def _short(loss: str) -> str:
    """The same text for all forms of one optimizer in which the same happens."""
    name, how, result = re.sub(r"\[host [^]]*\] ", "", " ".join(loss.split())).split(", ", 2)
    _, _, what = result.partition(": ")
    return f"{name}, {how}: {what}"[:240]


def main(arguments: Sequence[str]) -> int:
    hows = [how for how in (*WRAPPERS, TRAINER) if how in arguments] or [*WRAPPERS, TRAINER]
    words = [word.lower() for word in arguments if word not in (*WRAPPERS, TRAINER)]

    def wanted(name: str) -> bool:
        return not words or any(word in name.lower() for word in words)

    tell = f"/proc/{os.getpid()}/fd/2"  # stderr, for the ranks too: nobody may write over a line
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)
    say(tell, "the optimizers that are installed are imported")
    names = list(filter(wanted, everyone()))
    of_trainer = [one for one in trainer_optimizers.everyone() if wanted(f"transformers: {one}")]
    if not names and not of_trainer:
        say(tell, f"no optimizer has {' or '.join(words)} in its name")
        return 2
    found = table(names, [how for how in hows if how in WRAPPERS] if names else [], tell=tell)
    if TRAINER in hows and of_trainer:
        rows = trainer_optimizers.rows(of_trainer, partial(say, tell))
        found[TRAINER] = {f"transformers: {name}": row for name, row in rows.items()}
    text = written(found)
    if arguments:
        print(text)
    else:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
        print(f"{len(losses(found))} losses; wrote {PAGE.relative_to(ROOT)}")
    return 1 if losses(found) else 0


if __name__ == "__main__":
    folder = os.environ.get("SMCKPT_OPTIMIZER_PACKAGES", "")
    if folder and folder not in sys.path:  # torchao and bitsandbytes, for this and its ranks alone
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), folder])
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao compiles each step anew
        arguments = ["-m", "tests.support.optimizers.table", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *arguments])
    sys.exit(main(sys.argv[1:]))

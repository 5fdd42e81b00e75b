"""Which optimizers resume exactly: through torch's own pair of methods, and through smckpt.

    ./dev optimizers           try every optimizer that is installed, write docs/optimizers.md
    ./dev optimizers NAME …    those whose name contains one of these; the table is printed

A cell trains two steps, saves, loads into a fresh model and a fresh optimizer, and trains two more.
It is right if all weights are, bit for bit, those of a run without the save in between.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.launch import run_ranks
from tests.support.optimizers import everyone, net, step

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "optimizers.md"
BEGIN = "<!-- written by ./dev optimizers -->\n"
END = "<!-- end of what ./dev optimizers wrote -->"
FORMS = ("stock", "object", "LOCAL", "SHARDED", "FULL")
WRAPPERS = {"plain": 1, "DDP": 2, "FSDP1": 2, "FSDP2": 2}
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
    model = wrapped(net(seed), how)
    optimizer = everyone(name)[name](model)
    for number in steps:
        step(model, optimizer, number)
    return model, optimizer


def bits(model: nn.Module) -> list[Any]:
    found = []
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        found.append(local.detach().contiguous().view(torch.uint8).tolist())
    return found


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
            torch.save(optimizer.state_dict(), saved)
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
    names: Sequence[str], how: str, forms: Sequence[str], folder: str
) -> dict[str, dict[str, str]]:
    """Name → form → what happened, on one rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: dict[str, dict[str, str]] = {}
    for number, name in enumerate(names):
        try:
            wanted = bits(trained(name, how, 0, range(4))[0])
            again = bits(trained(name, how, 0, range(4))[0]) == wanted
        except Exception as error:
            wanted, again = [], False
            reason = f"untrained: {type(error).__name__} {error}"
        else:
            reason = "untrained: it draws other numbers in each run"
        if dist.is_initialized():
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, again)
            again = all(everywhere)
        if not again:
            found[name] = dict.fromkeys(forms, reason)
            continue
        found[name] = {}
        for form in forms:
            place = Path(folder) / how / str(number) / form
            result = cell(name, how, form, wanted, place)
            if dist.is_initialized():
                everywhere = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, result)
                result = next((each for each in everywhere if each != "exact"), "exact")
            found[name][form] = result
    return found


def table(
    names: Sequence[str], wrappers: Sequence[str] = tuple(WRAPPERS), forms: Sequence[str] = FORMS
) -> dict[str, dict[str, dict[str, str]]]:
    """Wrapper → name → form → what happened. Each optimizer under a wrapper has ranks of its own,
    so one that dies takes no other with it."""
    out: dict[str, dict[str, dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for how in wrappers:
            if WRAPPERS[how] == 1:
                out[how] = cells(names, how, forms, folder)
                continue
            out[how] = {}
            for name in names:
                try:
                    found = run_ranks(cells, WRAPPERS[how], [name], how, forms, folder)[0]
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    found = {name: dict.fromkeys(forms, f"untrained: {error}")}
                out[how] |= found
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
        f"Tried with {shown}. In a cell: {', '.join(FORMS)}.",
        "",
        f"| optimizer | {' | '.join(found)} |",
        f"|---|{'---|' * len(found)}",
    ]
    for name in names:
        row = (found[how].get(name, {}) for how in found)
        marks = (
            " ".join(MARKS.get(each.split(":")[0], "✗") for each in results.values())
            for results in row
        )
        lines.append(f"| {name} | {' | '.join(marks)} |")
    bad = losses(found)
    lines += ["", "Where stock resumes and smckpt does not:", ""]
    shown_of = (re.sub(r"\[host [^]]*\] ", "", " ".join(each.split()))[:300] for each in bad)
    lines += [f"- {each}" for each in shown_of] or ["- none"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    names = [name for name in everyone() if not arguments or any(a in name for a in arguments)]
    found = table(names)
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
    sys.exit(main(sys.argv[1:]))

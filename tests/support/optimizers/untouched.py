"""A process that trains with every optimizer, without smckpt or with a save and a load of the model
alone in between, and prints what each optimizer then is."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.optimizers.people import everyone, net, step


def described(model: Any, optimizer: Any) -> dict[str, Any]:
    own = object.__getattribute__(optimizer, "__dict__")
    given = optimizer.state_dict()
    return {
        "attributes": sorted(own),
        "hooks": {k: len(v) for k, v in own.items() if k.endswith("_hooks")},
        "dicts": [type(given).__name__, *(type(v).__name__ for v in given.values())],
        "state": digest(given),
        "weights": digest(list(model.parameters())),
    }


def digest(value: Any) -> str:
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), str(value.dtype), sorted(vars(value))
    if isinstance(value, dict):
        return [(repr(k), plain(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def main(folder: str | None) -> None:
    warnings.simplefilter("ignore")
    built: dict[str, Any] = {}
    for name, build in everyone().items():
        if name.startswith("torch.distributed") or name.endswith((": demo", ": distributedmuon")):
            continue  # they want a process group
        model = net()
        built[name] = model, build(model)
        step(*built[name], 0)
    if folder is not None:
        import smckpt
        from smckpt import LOCAL, sm_state_dict_type

        for number, (model, _) in enumerate(list(built.values())[:3]):
            place = Path(folder) / str(number)
            with sm_state_dict_type(model, LOCAL):
                smckpt.save({"model": model.state_dict()}, checkpoint_id=place)
            smckpt.load({"model": model}, checkpoint_id=place)
    out: dict[str, Any] = {}
    for name, (model, optimizer) in built.items():
        if folder is None:
            step(model, optimizer, 1)
            out[name] = described(model, optimizer)
        else:
            with smckpt.sm_state_dict_type(net(), smckpt.SHARDED):  # of another model
                step(model, optimizer, 1)
                out[name] = described(model, optimizer)
    kind = torch.optim.Optimizer
    out["torch"] = {
        "methods": [kind.state_dict.__module__, kind.load_state_dict.__module__],
        "hooks": [
            len(sys.modules["torch.optim.optimizer"].__dict__[f"_global_optimizer_{when}_hooks"])
            for when in ("pre", "post")
        ],
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:] or (None,))

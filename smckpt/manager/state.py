"""A run's live objects as one state: take their state for a save, and give it back after a load."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import numpy.random as of_numpy  # NumPy itself imports it at its first use, the first save
import torch
from torch import nn

from smckpt.errors import TopologyError, UsageError
from smckpt.full.context import sm_state_dict_type
from smckpt.state_dict import SMStateDictType
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.tags import is_stateful

log = logging.getLogger("smckpt")


def models_in(state: Any) -> list[nn.Module]:
    """The modules in a state, in its order."""
    return [value for _, value in _named(state, "") if isinstance(value, nn.Module)]


def optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """Those that a state holds, but for those inside of objects."""
    return [value for _, value in _named(state, "") if isinstance(value, torch.optim.Optimizer)]


def taken(state: Mapping[str, Any], kind: SMStateDictType) -> dict[str, Any]:
    """The state of the objects in `state`: a save writes it, a load fills it. No collective runs.

    A model gives its state dict of this kind, an optimizer what `optimizer_state` gives. Any other
    object with `state_dict` and `load_state_dict` stays itself: a save takes its state, and a load
    gives it exactly what was saved, of whatever form. The tensors are the live ones.

    Raises:
        StateError: as `optimizer_state`.
    """
    models = models_in(state)

    def take(value: Any) -> Any:
        if isinstance(value, nn.Module):
            with sm_state_dict_type(value, kind):
                return value.state_dict()
        if isinstance(value, torch.optim.Optimizer):
            return optimizer_state(value, models, kind)
        if is_stateful(value):
            return value
        if isinstance(value, Mapping):
            return {key: take(child) for key, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(take(child) for child in value)
        return value

    return {key: take(value) for key, value in state.items()}


def run_state(state: Mapping[str, Any], step: int, random: bool) -> dict[str, Any]:
    """What a save of the manager writes: LOCAL state, the step and perhaps the random generators.

    Raises:
        UsageError: this is no state, or it uses the manager's own key.
    """
    if not isinstance(state, Mapping) or not state:
        raise UsageError(
            f"the state is a {type(state).__name__}, or empty",
            remedy='pass a dict such as {"model": model, "optimizer": optimizer}',
        )
    if "manager" in state:
        raise UsageError(
            'the state has a key "manager", which the manager uses for its own values',
            remedy="rename it",
        )
    live = taken(state, SMStateDictType.SM_LOCAL_STATE_DICT)
    own: dict[str, Any] = {"step": step}
    if random:
        own["random"] = random_state()
    return {**live, "manager": own}


def give_back(state: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """After a load: put values into `state`. Its objects have their state: the load filled live
    tensors, and gave the rest."""
    for key, value in list(state.items()):
        state[key] = _given(value, loaded[key])


def _given(value: Any, loaded: Any) -> Any:
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or is_stateful(value):
        return value
    if isinstance(value, MutableMapping) and isinstance(loaded, Mapping):
        for key in [key for key in value if key not in loaded]:
            del value[key]
        for key, child in loaded.items():
            value[key] = _given(value.get(key), child)
        return value
    if type(value) in (list, tuple) and len(value) == len(loaded):
        items = [_given(child, new) for child, new in zip(value, loaded, strict=True)]
        if isinstance(value, tuple):
            return tuple(items)
        value[:] = items
        return value
    return loaded


# Their objects with a state (loaders, samplers, iterable datasets) count what one rank has read.
_PACKAGES_OF_POSITIONS = ("torchdata", "datasets")


def refuse_positions_of_ranks(state: Mapping[str, Any], saved_by: Any, ranks: int) -> None:
    """Refuse objects of torchdata and of Hugging Face datasets if another number of ranks has saved
    their state. No rank's position in its share of the data is one in another share: samples would
    be left out, and others come twice.

    Raises:
        TopologyError: there are such objects, and the numbers differ.
    """
    if saved_by == ranks:
        return
    for name, value in _named(state, ""):
        packages = {one.__module__.partition(".")[0] for one in type(value).__mro__}
        if is_stateful(value) and packages & set(_PACKAGES_OF_POSITIONS):
            raise TopologyError(
                f"{name} is a {type(value).__name__}, whose position each rank counts in its own "
                f"share of the data. {saved_by} ranks have saved it, and {ranks} restore it: "
                "samples would be left out, and others come twice",
                remedy=f"start with {saved_by} ranks. Or restore without {name}, and find the "
                "position from a count of the whole job's samples (class Samples in "
                "docs/manager.md)",
            )


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The objects in a state by their dotted path."""
    if isinstance(value, Mapping):
        children: Iterator[tuple[Any, Any]] = iter(value.items())
    elif type(value) in (list, tuple):
        children = enumerate(value)
    else:
        yield name, value
        return
    for key, child in children:
        yield from _named(child, f"{name}.{key}" if name else str(key))


def optimizer_state(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module], kind: SMStateDictType
) -> Any:
    """What stands for an optimizer in a state: its state dict, within the block of its model.

    One that trains tensors of several models, or of none, has no names for all of them. It stands
    there itself, and they are numbered, as in torch's own dict. `LOCAL` numbers them too, so that
    one of a single model and of others stays within its block, as in older checkpoints.

    Raises:
        StateError: it trains tensors of a model under FSDP1, and others: the part of a tensor needs
            the name that has its shape.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [(model, set(map(id, model.parameters()))) for model in models]
    within = [model for model, of in held if trained <= of]
    if not within:
        owners = [model for model, of in held if not trained.isdisjoint(of)]
        alone = len(owners) == 1 and kind is SMStateDictType.SM_LOCAL_STATE_DICT
        within = owners if alone or any(map(Fsdp1View.sees, owners)) else []
    if not within:
        return optimizer
    with sm_state_dict_type(within[0], kind):
        return optimizer.state_dict()


class Failed(Mapping[str, Any]):
    """A state that could not be taken. Its save fails with that error on every rank."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        return 1


# -- random numbers ------------------------------------------------------------------------------


_NO_CUDA = 255  # each byte of the device generator's state on a rank that has used no device


def random_state() -> dict[str, Any]:
    """The generators of this process: Python's, NumPy's, torch's, and that of its own device."""
    version, words, gauss = random.getstate()
    numpy: Any = of_numpy.get_state(legacy=False)
    state = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": {
            "kind": numpy["bit_generator"],
            "key": np.array(numpy["state"]["key"], np.uint32),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        # A rank that has used no device does not get a context on one here, and still has the same
        # keys.
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state() if used else _no_cuda()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of `random_state`."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(map(int, python["words"])), python["gauss"]))
    of_numpy.set_state(
        {
            "bit_generator": numpy["kind"],
            "state": {"key": np.asarray(numpy["key"], np.uint32), "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and not torch.equal(state["cuda"].cpu(), _no_cuda()):
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _no_cuda() -> torch.Tensor:
    return torch.full((16,), _NO_CUDA, dtype=torch.uint8)


def go_on_at_random(
    mark: Mapping[str, Any], saved: Mapping[str, Any], step: int, rank: int, world: int
) -> None:
    """Give the generators the state that was saved; seed them where the job has another number of
    ranks.

    Args:
        mark: the manager's record of the checkpoint.
    """
    if mark.get("ranks") == world:
        set_random_state(saved)
        return
    text = f"{mark.get('run')} {step} {rank} {world}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    random.seed(seed)
    of_numpy.seed(seed)
    torch.manual_seed(seed)
    if rank == 0:
        log.warning(
            "step %d was saved by %s ranks and is restored by %d: random numbers begin anew",
            step,
            mark.get("ranks"),
            world,
        )


def random_target(names: list[str]) -> dict[str, Any]:
    """Arrays into which a load reads the saved random state."""
    if not names:
        return {}
    here = random_state()
    absent = {"cuda": torch.zeros(16, dtype=torch.uint8)}
    return {"random": {name: here.get(name, absent.get(name)) for name in names}}

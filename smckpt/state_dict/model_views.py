"""The view of a model: the first registered view that recognises it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from smckpt.errors import UsageError
from smckpt.layout.entries import Path, dotted
from smckpt.registry import Registry
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.views import DdpView, Fsdp2View, ModelView

_VIEWS: Registry[Any] = Registry(
    "model view",
    type,
    "smckpt.model_views",
    {"fsdp2": Fsdp2View, "ddp": DdpView, "fsdp1": Fsdp1View},  # the last is asked first,
)


def register_model_view(name: str, view: type[ModelView]) -> None:
    """Register the view of a wrapper of models. `view.sees` is asked before smckpt's own views.

    Args:
        name: the wrapper's name, which no other view has.

    Raises:
        UsageError: `view` is not a subclass of `ModelView`, or another one has the name.
    """
    _VIEWS.register(name, _checked(name, view))


def view_of(model: nn.Module) -> ModelView:
    """The view of a model. A model from `torch.compile` is unwrapped first.

    Raises:
        UsageError: an installed package brings a view that is not a `ModelView`.
    """
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[assignment]
    for name, view in reversed(_VIEWS.all().items()):
        if _checked(name, view).sees(model):
            return view(model)  # type: ignore[no-any-return]
    return ModelView(model)


def names_in_state(modules: Iterable[tuple[Path, nn.Module]]) -> dict[int, tuple[str, str]]:
    """By id: the names of the parameters of modules in a state, after the path of the module and
    without it."""
    found: dict[int, tuple[str, str]] = {}
    for path, module in modules:
        view = view_of(module)
        for raw, parameter in module.named_parameters(remove_duplicate=False):
            name = view.name(raw)
            found.setdefault(id(parameter), (dotted((*path, name)), name))
    return found


def modules_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, nn.Module]]:
    """The modules in a nested state, each with its path."""
    if isinstance(tree, nn.Module):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(child, (dict, list, tuple, nn.Module)):
                yield from modules_in(child, (*path, key))


def _checked(name: str, view: Any) -> type[ModelView]:
    if not (isinstance(view, type) and issubclass(view, ModelView)):
        raise UsageError(f"the model view {name!r} is {view!r}", remedy="give a ModelView subclass")
    return view

"""The view of a model: the first registered view that recognises it."""

from __future__ import annotations

from typing import Any

from torch import nn

from smckpt.errors import UsageError
from smckpt.registry import Registry
from smckpt.state_dict.fsdp1 import Fsdp1View
from smckpt.state_dict.views import DdpView, Fsdp2View, ModelView

__all__ = ["register_model_view", "view_of"]

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


def _checked(name: str, view: Any) -> type[ModelView]:
    if not (isinstance(view, type) and issubclass(view, ModelView)):
        raise UsageError(f"the model view {name!r} is {view!r}", remedy="give a ModelView subclass")
    return view

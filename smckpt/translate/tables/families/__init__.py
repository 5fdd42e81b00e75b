"""The families of models that smckpt translates: one table for each, and those of other
packages."""

from __future__ import annotations

from collections.abc import Collection

from smckpt.errors import UsageError
from smckpt.registry import Registry
from smckpt.translate.tables.families import dense, mixtures, vision
from smckpt.translate.tables.table import Family

__all__ = ["built_in_names", "family_of", "find_family", "is_built_in", "register_family"]

_BUILT_IN = {
    family.name: family for module in (dense, mixtures, vision) for family in module.FAMILIES
}
_FAMILIES = Registry("family of models", Family, "smckpt.families", _BUILT_IN)


def register_family(family: Family) -> None:
    """Register a family of models for the life of the process.

    An installed package registers one through an entry point of the group `smckpt.families`, named
    as the family's `model_type`.

    Raises:
        UsageError: another family has this `model_type`.
    """
    _FAMILIES.register(family.name, family)


def is_built_in(model_type: str) -> bool:
    """Whether the family is built in. smckpt's tests compare built-in families with
    transformers."""
    return model_type in _BUILT_IN


def built_in_names() -> Collection[str]:
    return _BUILT_IN.keys()


def find_family(model_type: str) -> Family | None:
    """
    Raises:
        UsageError: an installed package brings one that cannot be used, or one by the name of a
            built-in one.
    """
    _FAMILIES.refuse_taken(model_type)
    return _FAMILIES.find(model_type)


def family_of(model_type: str, where: str | None = None) -> Family:
    """
    Raises:
        UsageError: no family has this `model_type`; the message lists the known ones.
    """
    found = find_family(model_type)
    if found is None:
        raise UsageError(
            f"smckpt has no table for the model type {model_type!r}",
            remedy=f"tables exist for {', '.join(sorted(_FAMILIES.names))}; a model of another "
            "type can be exported only under its own Hugging Face names",
            path=where,
        )
    return found

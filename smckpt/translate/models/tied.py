"""What an adapter trains of tensors that are one in the base, as an embedding and a head are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.translate.files import Target
from smckpt.translate.models.merged import (
    Adapters,
    Change,
    Merged,
    MergedSource,
    changed_tensor,
    first_elements,
)
from smckpt.translate.ranks.translated import Translated
from smckpt.translate.stream import equal
from smckpt.translate.tables.hub import HubTensor, find_ties

# The name of a layer's tensor, which is no embedding or head.
OF_LAYER = re.compile(r"^(?!.*(head|emb)).*\.\d+\.")


def named_ties(names: Collection[str]) -> list[tuple[str, str]]:
    """The ties of a directory whose model transformers does not know, by their names: of one that
    is not there, and of the one that it is."""
    found = find_ties(names) or find_ties([*names, "lm_head.weight"])
    return [(tie.left_out, tie.kept) for tie in found]


def _alike(source: MergedSource, one: Target, other: Target) -> bool:
    """Whether what adapters add to two tensors leaves them one, as `ensure_weight_tying` does."""
    a, b = (first_elements(source, each) for each in (one, other))
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * abs(a).max()))


def refuse_tied(
    source: MergedSource, base: Mapping[str, Translated],
    adapters: Adapters, changes: Mapping[str, tuple[Change, ...]],
) -> None:  # fmt: skip
    """Raise UsageError if an adapter changes a tensor, and not another one that was the same: such
    is the head of a model that ties it to the embedding, by whatever name.
    """
    originals = {name: t for parts, _ in adapters for name, t in parts.originals.items()}
    begun = {
        name: tensor
        for name, tensor in {**base, **originals}.items()
        if len(tensor.shape) == 2 and not OF_LAYER.search(name)
    }
    for name in sorted(begun.keys() & {*changes, *originals}):
        for other in sorted(begun.keys() - {name}):
            if not equal(source, begun[name], begun[other]):
                continue
            if name not in changes and equal(source, base[name], base[other]):
                continue  # both are saved whole, and alike
            made = [changed_tensor(base[n], changes.get(n, ()), None) for n in (name, other)]
            if {name, other} <= {*changes} and _alike(source, *made):
                continue
            raise UsageError(
                f"the adapter changes {name}, an embedding or head that is one tensor with "
                f"{other} in the base",
                remedy='export it with lora="adapter"; or, if the model was trained with both, '
                "pass config= with tie_word_embeddings=False",
            )


def refuse_untied(
    source: MergedSource, ties: Iterable[tuple[str, str]], hub: Mapping[str, HubTensor],
    targets: Sequence[Merged | Translated], changes: Mapping[str, tuple[Change, ...]],
    adapters: Adapters,
) -> None:  # fmt: skip
    """Raise UsageError if an adapter trains one of two tensors that are one in a directory, and not
    the other one alike: there is no room for both.

    Args:
        ties: names in memory: of one that has no room of its own, and of the one that it is.
    """
    saved = {name for parts, _ in adapters for name in parts.saved}
    trained = saved | {*changes}
    both = all(config.values.get("ensure_weight_tying") for _, config in adapters)
    made: dict[str, Merged | Translated] = {}  # what is written of a tensor in memory
    for target in targets:
        tensor = hub.get(target.name)
        made |= {part: target for part, _ in tensor.parts} if tensor else {target.name: target}
    for name, root in ties:
        if name in made or trained.isdisjoint((name, root)):
            continue
        written, own = made.get(root), changes.get(name, ())
        if both and root in saved and name not in trained:
            continue
        if isinstance(written, Merged) and own:
            other_made = changed_tensor(written.base, own, None)
            if _alike(source, written, other_made):
                continue
        one, other = (name, root) if name in trained else (root, name)
        raise UsageError(
            f"the adapter trains {one}, an embedding or head that the config ties to {other}, "
            "and not both alike",
            remedy='export it with lora="adapter"; or, if the checkpoint has the base, leave '
            "base= out and pass config= with tie_word_embeddings=False",
        )
    if lost := sorted(changes.keys() - made.keys() - {name for name, _ in ties}):
        raise KeysMismatchError(
            f"the directory lacks {lost[0]}, which the adapter changes",
            remedy="pass base= the whole directory of the base model",
        )

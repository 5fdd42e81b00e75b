"""What an adapter trains of tensors that are one in the base, as an embedding and a head are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from smckpt.errors import KeysMismatchError, UsageError
from smckpt.translate.models.merged import Adapters, Merged
from smckpt.translate.ranks.translated import Translated, TranslatedSource
from smckpt.translate.stream import equal
from smckpt.translate.tables.hub import HubTensor, find_ties

# The name of a layer's tensor, which is no embedding or head.
OF_LAYER = re.compile(r"^(?!.*(head|emb)).*\.\d+\.")


def named_ties(names: Collection[str]) -> list[tuple[str, str]]:
    """The ties of a directory whose model transformers does not know, by their names: of one that
    is not there, and of the one that it is."""
    found = find_ties(names) or find_ties([*names, "lm_head.weight"])
    return [(tie.left_out, tie.kept) for tie in found]


def _together(adapters: Adapters) -> bool:
    """Whether adapters train two tensors that are one alike. Of more (an encoder's and a decoder's
    embedding and a head), PEFT trains each in its own manner."""
    return all(config.values.get("ensure_weight_tying") for _, config in adapters)


def refuse_tied(
    source: TranslatedSource, base: Mapping[str, Translated],
    adapters: Adapters, changed: Collection[str],
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
    for name in sorted(begun.keys() & {*changed, *originals}):
        others = [n for n in sorted(begun.keys() - {name}) if equal(source, begun[name], begun[n])]
        if _together(adapters) and len(others) == 1 and {name, *others} <= {*changed}:
            continue
        for other in others:
            if name not in changed and equal(source, base[name], base[other]):
                continue  # both are saved whole, and alike
            raise UsageError(
                f"the adapter changes {name}, an embedding or head that is one tensor with "
                f"{other} in the base",
                remedy='export it with lora="adapter"; or, if the model was trained with both, '
                "pass config= with tie_word_embeddings=False",
            )


def refuse_untied(
    ties: Collection[tuple[str, str]], hub: Mapping[str, HubTensor],
    targets: Sequence[Merged | Translated], changed: Collection[str], adapters: Adapters,
) -> None:  # fmt: skip
    """Raise UsageError if an adapter trains one of two tensors that are one in a directory, and not
    the other one alike: there is no room for both.

    Args:
        ties: names in memory: of one that has no room of its own, and of the one that it is.
    """
    trained = {*changed}.union(*(parts.saved for parts, _ in adapters))
    parts_of = {name: [part for part, _ in tensor.parts] for name, tensor in hub.items()}
    held = {part for t in targets for part in parts_of.get(t.name, [t.name])}
    for name, source in ties:
        if name not in held and not trained.isdisjoint((name, source)):
            of_source = [one for one, other in ties if other == source]
            if _together(adapters) and source in trained and len(of_source) == 1:
                continue
            one, other = (name, source) if name in trained else (source, name)
            raise UsageError(
                f"the adapter trains {one}, an embedding or head that the config ties to {other}, "
                "and not both alike",
                remedy='export it with lora="adapter"; or, if the checkpoint has the base, leave '
                "base= out and pass config= with tie_word_embeddings=False",
            )
    if lost := sorted({*changed} - held - {name for name, _ in ties}):
        raise KeysMismatchError(
            f"the directory lacks {lost[0]}, which the adapter changes",
            remedy="pass base= the whole directory of the base model",
        )

"""Rows of the vocabulary: which stored rows are padding, and which a tokenizer uses.

Trainers round the vocabulary up so that tensor-parallel ranks share it evenly: Megatron-LM
(`_vocab_size_with_padding`), Megatron Bridge (`calculate_padded_vocab_size`), NeMo and GPT-NeoX to
a multiple of make_vocab_size_divisible_by, 128 by default, times the tensor-parallel degree. That
is the degree at which training began: a checkpoint that was resharded keeps its padding. Others
take a power of two below that (8 or 64: transformers' `pad_to_multiple_of`), or the degree alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smckpt.checkpoint.records.sealed import read_json
from smckpt.errors import TensorMismatchError, UsageError
from smckpt.formats.degrees import check_counts

_DIVISIBLE_BY = 128  # the default of make_vocab_size_divisible_by
_BEGUN_AT = 8  # the largest degree, besides the present one, at which training may have begun


def check_rows(stored: Mapping[str, int], size: int, tp: int, given: int | None) -> int:
    """How many rows the stored vocabulary has.

    Args:
        stored: the rows of each tensor that may be padded, of all ranks together.
        size: the config's vocab_size.
        tp: the tensor-parallel degree.
        given: how many there must be; None: as many as trainers round `size` up to.

    Raises:
        UsageError: `given` is less than the vocabulary has.
        TensorMismatchError: the number is another, or tensors differ.
    """
    check_counts(padded_vocab_size=size if given is None else given)
    if given is not None and given < size:
        raise UsageError(
            f"padded_vocab_size={given} is less than vocab_size={size} of the config",
            remedy="pass the number of rows that are stored, padding included, or leave it out",
        )
    if len(set(stored.values())) > 1:
        raise TensorMismatchError(
            f"tensors of one vocabulary have different total numbers of rows: {_counts(stored)}",
            remedy="pass the files, or the checkpoint, of one model",
        )
    found = next(iter(stored.values()), size)  # without padding: shapes are checked
    if given not in (None, found):
        raise TensorMismatchError(
            f"padded_vocab_size={given}, but there are {found} rows in total"
            + (f": {_counts(stored)}" if stored else ", of a layout without padding"),
            remedy=f"pass padded_vocab_size={found} if that is the vocabulary with its padding, "
            "and the files of all ranks",
        )
    most = most_padding(found, tp)
    if given is None and found - size > most:
        raise TensorMismatchError(
            f"{_counts(stored)} rows in total, {found - size} more than vocab_size={size} of the "
            f"config; rounding up to a multiple, as trainers do, adds at most {most}",
            remedy="pass the model's own config; if these rows are padding, pass "
            f"padded_vocab_size={found}",
        )
    return found


def _counts(stored: Mapping[str, int]) -> str:
    return ", ".join(f"{name} has {rows}" for name, rows in stored.items())


def padded_rows(size: int, tp: int, multiple: int) -> int:
    """The number of rows with padding, so that each of `tp` ranks has a multiple of `multiple`."""
    step = multiple * tp
    return -(-size // step) * step


def most_padding(rows: int, tp: int) -> int:
    """How many of `rows` can be padding if trainers rounded them up: fewer than the largest such
    multiple that divides them."""
    shared = tp * math.gcd(rows // tp, _DIVISIBLE_BY) if rows % tp == 0 else 1
    return max(shared, math.gcd(rows, _BEGUN_AT * _DIVISIBLE_BY)) - 1


def check_tokenizer(tokenizer: Any, size: int, stored: int) -> None:
    """Raise UsageError if the tokenizer (its directory, or the object) uses a row that would be cut
    off as padding. A tokenizer that cannot be read is ignored."""
    if stored == size:
        return
    used = [number for number in _ids(tokenizer) if size <= number < stored]
    if used:
        raise UsageError(
            f"the tokenizer has the id {max(used)}, but vocab_size={size} would cut off its row "
            f"as padding ({stored} rows are stored)",
            remedy="correct vocab_size in the config; if the model was trained without that token, "
            f"pass padded_vocab_size={stored}",
            path=str(tokenizer) if isinstance(tokenizer, Path) else None,
        )


def note_on_ids(
    tokenizer: Any, generation: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Notes if the tokenizer, or the generation config, has ids for which the embedding has no row.
    A tokenizer that cannot be read is ignored.

    Args:
        shapes: of the tensors that are written.
    """
    rows = [shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDINGS)]
    if len(set(rows)) != 1:
        return ()
    notes = []
    for key, given in (generation or {}).items():
        ids = given if isinstance(given, (list, tuple)) else [given]
        if key.endswith("_token_id") and any(type(n) is int and n >= rows[0] for n in ids):
            notes.append(
                f"{key} is {given}, but the embedding has {rows[0]} rows: the model never writes "
                "such a token. Pass the model's own config, and generation_config="
            )
    beyond = [] if tokenizer is None else [n for n in _ids(tokenizer) if n >= rows[0]]
    if not beyond:
        return tuple(notes)
    return (
        *notes,
        f"the tokenizer has {len(set(beyond))} ids up to {max(beyond)}, but the embedding has "
        f"{rows[0]} rows: a text with one of them fails. Pass the model's own tokenizer, or resize "
        "the embedding before training",
    )


def _ids(tokenizer: Any) -> Iterator[int]:
    """The token ids of a tokenizer, as far as they are known."""
    if isinstance(tokenizer, Path):
        for name, ids_of in _FILES.items():
            try:
                found = list(ids_of(read_json(tokenizer / name)))
            except (OSError, ValueError, TypeError, AttributeError, LookupError):
                continue
            yield from found
        lines = tokenizer / _LINES  # of BERT and its kin: a token in each line
        if lines.is_file() and lines.stat().st_size <= _MOST_LINES:
            yield from range(len(lines.read_bytes().splitlines()))
        return
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    if callable(getattr(tokenizer, "get_vocab", None)):
        yield from tokenizer.get_vocab().values()


def _of_tokenizers(file: Any) -> Iterator[int]:
    """The ids in a file of the tokenizers library: by token, or (Unigram) in the order of a
    list."""
    vocabulary = file["model"]["vocab"]
    if isinstance(vocabulary, list):
        yield from range(len(vocabulary))
    else:
        yield from map(int, vocabulary.values())
    for token in file.get("added_tokens") or ():
        yield int(token["id"])


# of language models
_EMBEDDINGS = tuple(
    f"{name}.weight" for name in ("embed_tokens", "embed_in", "wte", "word_embeddings", "shared")
)
_LINES, _MOST_LINES = "vocab.txt", 1 << 26  # bytes
_FILES: Mapping[str, Callable[[Any], Iterator[int]]] = {
    "tokenizer.json": _of_tokenizers,
    "vocab.json": lambda file: map(int, file.values()),
    "added_tokens.json": lambda file: map(int, file.values()),
    "tokenizer_config.json": lambda file: map(int, file.get("added_tokens_decoder") or ()),
}

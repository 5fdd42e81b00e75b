"""Lists of tensor names by other projects: what serving code takes, what releases have.

`tests/translate/data` holds them as data, each with its source. A `*` in a name stands for one
number. Of other spellings that a server takes too, a list may leave out some: a name that it
refuses is not the name that the family has in releases.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "translate" / "data"
SERVERS = ("llama.cpp", "sglang", "vllm")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_HEAD = re.compile(r"(language_model\.)?lm_head\.weight")  # releases with a tied head have none
# Constants that old versions of transformers wrote into files, and newer ones do not.
_CONSTANTS = re.compile(r".*\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)")


def folded(names: Iterable[str]) -> set[str]:
    """The names with `*` in place of the numbers of layers and experts."""
    return {_NUMBER.sub("*", name) for name in names}


def read(name: str) -> dict[str, Any]:
    """The families of one list."""
    families: dict[str, Any] = json.loads((DATA / f"names-{name}.json").read_text())["families"]
    return families


@dataclass(frozen=True)
class Takes:
    """What a server takes of one family: tensors that it needs, each as alternatives of names that
    stand for it together; and others."""

    needed: tuple[tuple[frozenset[str], ...], ...]
    optional: tuple[tuple[frozenset[str], ...], ...]

    @staticmethod
    def of(server: str, family: str) -> Takes | None:
        """None: the list does not have the family."""
        entry = read(server).get(family)
        if entry is None:
            return None
        return Takes(*(tuple(map(_ways, entry[key])) for key in ("required", "optional")))

    def problems(self, names: Iterable[str]) -> list[str]:
        """Names that the server does not know, and tensors that it needs and does not get."""
        found = folded(names)
        known = {name for ways in self.needed + self.optional for way in ways for name in way}
        return [f"refuses {name}" for name in sorted(found - known)] + [
            f"lacks {' or '.join(' and '.join(sorted(way)) for way in ways)}"
            for ways in self.needed
            if not any(way <= found for way in ways)
        ]

    def example(self) -> set[str]:
        """Names that the server takes."""
        return {name for ways in self.needed + self.optional for name in ways[0]}


def _ways(text: str) -> tuple[frozenset[str], ...]:
    """'a + b | c': a and b, or c."""
    return tuple(frozenset(way.split(" + ")) for way in text.split(" | "))


def released(family: str) -> set[str] | None:
    """The folded names of a released index, without the head; None if none was found."""
    entry = read("released").get(family)
    if entry is None:
        return None
    names = {entry.get("without_prefix", "") + name for name in entry["names"]}
    return {n for n in names if not _CONSTANTS.fullmatch(n) and not _HEAD.fullmatch(n)}


def released_problems(family: str, names: Iterable[str]) -> list[str] | None:
    """How names differ from those of a released index; None if none was found."""
    wanted = released(family)
    if wanted is None:
        return None
    found = {name for name in folded(names) if not _HEAD.fullmatch(name)}
    return [f"the release has no {name}" for name in sorted(found - wanted)] + [
        f"only the release has {name}" for name in sorted(wanted - found)
    ]


@dataclass(frozen=True)
class Whole:
    """All tensors of a release, layer by layer and expert by expert."""

    tensors: int
    sha256: str  # of the sorted names
    total_size: int | None  # bytes, 2 for each element
    head: bool

    @staticmethod
    def of(family: str) -> Whole | None:
        entry = read("released").get(family)
        if entry is None:
            return None
        head = any(_HEAD.fullmatch(name) for name in entry["names"])
        return Whole(entry["tensors"], entry["sha256"], entry.get("total_size"), head)

    def problems(self, sizes: Mapping[str, int]) -> list[str]:
        """How tensors, each with its number of elements, differ from the release."""
        found = {n: size for n, size in sizes.items() if self.head or not _HEAD.fullmatch(n)}
        said = []
        if len(found) != self.tensors:
            said.append(f"{len(found)} tensors, the release has {self.tensors}")
        elif hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest() != self.sha256:
            said.append("other names than the release")
        size = 2 * sum(found.values())
        if self.total_size is not None and size != self.total_size:
            said.append(f"{size} bytes, the release has {self.total_size}")
        return said


def problems(family: str, names: Iterable[str]) -> dict[str, list[str]]:
    """What every list that has the family says against the names, by list; [] for no problem."""
    names = list(names)
    said = {server: Takes.of(server, family) for server in SERVERS}
    out = {server: takes.problems(names) for server, takes in said.items() if takes}
    released = released_problems(family, names)
    return out if released is None else out | {"released": released}

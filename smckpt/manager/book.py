"""The checkpoints that a run has saved below its root, read from their manifests alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from smckpt.checkpoint.discover import FoundCheckpoint, found_at
from smckpt.checkpoint.prefixes import is_prefix
from smckpt.errors import CheckpointError, StorageError
from smckpt.manager.template import Template
from smckpt.storage import Storage
from smckpt.storage.urls import relative_url

__all__ = ["Book", "Damaged"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Damaged:
    """A step whose newest commit cannot be read."""

    step: int
    error: CheckpointError


class Book:
    """The steps below a root. One rank uses it.

    A commit never changes, so the book reads a directory once, until this run saves there.
    """

    def __init__(self, root: Storage, template: Template) -> None:
        self.root = root
        self.template = template
        self._known: dict[str, FoundCheckpoint] = {}

    def places(self) -> list[tuple[int, str]]:
        """(step, path from the root) of all directories that fit the template, newest first."""
        ways = [""]
        for _ in range(self.template.depth):
            ways = [
                f"{way}/{name}" if way else name
                for way in ways
                for name in (self.root.join(way) if way else self.root).list_dirs()
                if not is_prefix(name)
            ]
        steps = ((self.template.step_of(way), way) for way in ways)
        return sorted(((step, way) for step, way in steps if step is not None), reverse=True)

    def newest_first(self) -> Iterator[FoundCheckpoint | Damaged]:
        """The committed steps, newest first. Each is read when the caller takes it.

        Raises:
            StorageError: the store failed to read a directory, which may hold the newest step.
        """
        places = self.places()
        present = {way for _, way in places}
        self._known = {way: one for way, one in self._known.items() if way in present}
        for step, way in places:
            known = self._known.get(way)
            if known is None:
                try:
                    known = found_at(self.root.join(way))
                except StorageError:
                    raise
                except CheckpointError as error:
                    yield Damaged(step, error)
                    continue
            if known is None:
                continue  # an unfinished save
            if known.step != step:
                log.warning("%s is skipped: it holds step %s", known, known.step)
                continue
            self._known[way] = known
            yield known

    def all(self) -> list[FoundCheckpoint]:
        """The committed steps, oldest first, without damaged ones."""
        found = [one for one in self.newest_first() if isinstance(one, FoundCheckpoint)]
        return found[::-1]

    def way_of(self, found: FoundCheckpoint) -> str:
        """The path from the root to a checkpoint below it."""
        return relative_url(found.path, self.root.url)

    def forget(self) -> None:
        """Forget everything, so that the next look reads it again: other processes may have saved
        or deleted."""
        self._known = {}

    def changed(self, way: str) -> None:
        """Read this directory again: this run saved there or deleted from it."""
        self._known.pop(way, None)

"""Checks by size that all files of a checkpoint are there, with one listing per directory."""

from __future__ import annotations

from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.prefixes import PrefixStores, found_prefix_sharding
from smckpt.errors import CheckpointNotFoundError
from smckpt.storage import Storage
from smckpt.storage.urls import file_url

__all__ = ["what_is_missing"]


def what_is_missing(storage: Storage, identity: str | None = None) -> str:
    """The first file of the newest commit that is missing or cut short, as a text; "" if all are
    whole.

    The record and the manifests are compared with their checksums. Of the other files only the
    sizes are checked; `verify_checkpoint` checks their bytes.

    Args:
        identity: of the commit that is expected.

    Raises:
        CheckpointError: the commit cannot be read, or is not the expected one.
    """
    contents = contents_of(storage)
    if identity not in (None, contents.identity):
        raise CheckpointNotFoundError(
            f"the newest commit is {contents.identity}, not {identity}",
            remedy="try again: another save has committed here",
            path=storage.url,
        )
    for group in contents.groups:
        place = contents.storage.join(group.directory)
        manifest = group.manifest
        found = found_prefix_sharding(place, manifest.prefix_sharding, manifest.parts[0].name)
        at = PrefixStores(place, found)
        stores = {at.of(part.rank).url: at.of(part.rank) for part in manifest.parts}
        sizes = {url: {i.name: i.size for i in store.list()} for url, store in stores.items()}
        for part in manifest.parts:
            here = sizes[at.of(part.rank).url]
            expected: dict[str, int | None] = {part.name: None}
            for file in part.files:
                expected[file.name] = file.size
                expected[file.crc_name] = 8 * -(-file.size // BLOCK)
            for name, size in expected.items():
                path = file_url(at.of(part.rank).url, name)
                of = f"group {group.directory}, " if group.directory else ""
                of = f" ({of}rank {part.rank} on {part.host})"
                if name not in here:
                    return f"{path} is missing{of}"
                if size is not None and here[name] != size:
                    return f"{path} has {here[name]} of {size} bytes{of}"
    return ""

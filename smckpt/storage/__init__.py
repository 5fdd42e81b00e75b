"""Stores of files: one interface over file systems and object stores. `Access` opens them."""

from smckpt.storage.arguments import access_to, open_storage, own_access
from smckpt.storage.base import Access, FileInfo, FileWriter, Storage, register_store
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.spool import SpooledWriter

__all__ = [
    "Access",
    "FileInfo",
    "FileWriter",
    "SpooledWriter",
    "Storage",
    "StoreOptions",
    "access_to",
    "open_storage",
    "own_access",
    "register_store",
]

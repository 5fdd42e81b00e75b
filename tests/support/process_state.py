"""What tests of one process share. Each file of tests leaves it as it was, so that the files may
run in any order."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from smckpt.registry import Registry
from tests.support.limits import seconds

__all__ = ["changed", "end_saves", "registered", "restore_registered", "state"]

_REGISTRIES = {
    "smckpt.storage.base": "_STORES",
    "smckpt.state_dict.model_views": "_VIEWS",
    "smckpt.translate.families": "_FAMILIES",
    "smckpt.translate.layouts": "_LAYOUTS",
}
# Variables that pytest and torch set by themselves.
_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")
_CACHES = (("smckpt.storage.s3.requests", "_slot"), ("smckpt.storage.s3.pace", "_pace"))


def state() -> dict[str, Any]:
    """What a test might change for the tests after it."""
    shared: dict[str, Any] = {
        "os.environ": {k: v for k, v in os.environ.items() if not k.startswith(_LIBRARIES)},
        "the working directory": os.getcwd(),
        "the umask": _umask(),
        "sys.path": list(sys.path),
        "gc.isenabled()": gc.isenabled(),
        "the temporary directory": tempfile.gettempdir(),
        "the timeout of sockets": socket.getdefaulttimeout(),
        "threading.excepthook": threading.excepthook,
        "the handler of": {
            number.name: signal.getsignal(number)
            for number in signal.Signals
            if number is not signal.SIGALRM  # pytest-timeout's
        },
        "logging.disable()": logging.root.manager.disable,
    }
    for name in ("root", "smckpt"):
        logger = logging.getLogger(None if name == "root" else name)
        own = [one for one in logger.handlers if not type(one).__module__.startswith("_pytest")]
        shared[f"the logger {name!r}"] = (own, logger.filters[:], logger.level, logger.propagate)
    if (torch := sys.modules.get("torch")) is not None:
        shared["the process group"] = torch.distributed.is_initialized()
        shared["the default dtype"] = torch.get_default_dtype()
        shared["the default device"] = torch.get_default_device()
        shared["torch.is_grad_enabled()"] = torch.is_grad_enabled()
    return shared


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs, in words. What was imported meanwhile stands in `after` alone."""
    out = []
    for name, old in before.items():
        new = after[name]
        if not isinstance(old, dict):
            out += [f"{name}: {old!r} became {new!r}"] if old != new else []
            continue
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                out.append(f"{name} {key}: {old.get(key)!r} became {new.get(key)!r}")
    return out


def registered() -> dict[str, dict[str, Any]]:
    """What is registered in this process, by module: stores, views, families, layouts."""
    return {name: dict(registry.registered) for name, registry in _registries().items()}


def restore_registered(before: Mapping[str, dict[str, Any]]) -> None:
    """Registrations last as long as a process; here they last as long as a file of tests."""
    for name, registry in _registries().items():
        registry._registered = before.get(name, {})


def end_saves() -> list[str]:
    """End the queues, loaders and workers of this process, and forget its sinks, S3 clients and
    paces. Returns the sinks that somebody has left."""
    for module, cache in _CACHES:
        if module in sys.modules:
            getattr(sys.modules[module], cache).cache_clear()
    if (api := sys.modules.get("smckpt.engine.api")) is None:
        return []
    api._RUNTIME.close(seconds(60))
    sinks, api._RUNTIME.sinks._sinks = api._RUNTIME.sinks._sinks, []
    return [f"a sink is left: {sink!r}" for sink in sinks]


def _registries() -> dict[str, Registry[Any]]:
    return {
        module: getattr(sys.modules[module], name)
        for module, name in _REGISTRIES.items()
        if module in sys.modules
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

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

__all__ = ["end_saves", "registered", "restore", "restore_registered", "state"]

_REGISTRIES = {
    "smckpt.layout.containers": "_CLASSES",
    "smckpt.state_dict.parts": "_CLASSES",
    "smckpt.storage.base": "_STORES",
    "smckpt.registry": "READERS",
    "smckpt.state_dict.model_views": "_VIEWS",
    "smckpt.translate.tables.families": "_FAMILIES",
    "smckpt.translate.tables.layouts": "_LAYOUTS",
}
# Variables that pytest and torch set by themselves.
_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "CUDA_")
_NOT_OURS = (signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP)  # the first is pytest-timeout's
_CACHES = (("smckpt.storage.s3.requests", "_slot"), ("smckpt.storage.s3.requests", "_pace"))


def state() -> dict[str, Any]:
    """What a test might change for the tests after it."""
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": _umask(),
        "path": list(sys.path),
        "gc": gc.isenabled(),
        "temporary": tempfile.tempdir,
        "socket timeout": socket.getdefaulttimeout(),
        "excepthook": threading.excepthook,
        "handlers": {n: signal.getsignal(n) for n in signal.Signals if n not in _NOT_OURS},
        "disabled": logging.root.manager.disable,
        "loggers": {
            logger: (_own(logger), logger.filters[:], logger.level, logger.propagate)
            for logger in (logging.getLogger(), logging.getLogger("smckpt"))
        },
    }


def restore(before: Mapping[str, Any]) -> None:
    """Make the process as it was. Libraries change it too, on their first import or for good: so a
    change is undone, and is no failure of the file that made it."""
    for name in os.environ.keys() - before["environment"].keys():
        if not name.startswith(_LIBRARIES):
            del os.environ[name]
    os.environ.update(before["environment"])
    os.chdir(before["directory"])
    os.umask(before["umask"])
    # setuptools keeps what it brings at the end, for imports to come
    late = [p for p in sys.path if p not in before["path"] and p.endswith("setuptools/_vendor")]
    sys.path[:] = [*before["path"], *late]
    (gc.enable if before["gc"] else gc.disable)()
    tempfile.tempdir = before["temporary"]
    socket.setdefaulttimeout(before["socket timeout"])
    threading.excepthook = before["excepthook"]
    for number, handler in before["handlers"].items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)
    logging.disable(before["disabled"])
    for logger, (handlers, filters, level, propagate) in before["loggers"].items():
        pytests = [one for one in logger.handlers if one not in _own(logger)]
        logger.handlers[:], logger.filters[:] = [*pytests, *handlers], filters
        logger.setLevel(level)
        logger.propagate = propagate
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)


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


def _own(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers of a logger that are not pytest's."""
    return [one for one in logger.handlers if not type(one).__module__.startswith("_pytest")]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

"""Lets a running server load a directory's weights in place of its own: vLLM or SGLang.

Both read files, and have a documented call for it: vLLM's `/collective_rpc` of `reload_weights`
(its development mode), between `/pause` and `/resume`; SGLang's `/update_weights_from_disk`. A
server whose weights come and go so needs no restart. What the old weights have left in its cache of
prompts is dropped.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from smckpt.errors import CheckpointError, StorageError, UsageError
from smckpt.formats.names import INDEX
from smckpt.formats.readers.rank_files import weight_files, weight_map
from smckpt.formats.source_files import Folder, SourceFiles
from smckpt.storage.urls import path_on_disk

VLLM, SGLANG = "vLLM", "SGLang"
_ROUTES = {VLLM: "/collective_rpc", SGLANG: "/update_weights_from_disk"}
_TOKEN = "SMCKPT_SERVER_TOKEN"  # the variable with the server's key, if it wants one
_LIMIT = 16 << 20  # bytes of an answer
_SHOWN = 600  # characters of an answer


@dataclass(frozen=True)
class ReloadReport:
    """directory: what the server read, without links. kind: "vLLM" or "SGLang"."""

    server: str
    kind: str
    directory: str
    seconds: float


def reload_weights(
    directory: str | os.PathLike[str], server: Any, *, timeout: float = 600.0
) -> ReloadReport:
    """Let a server load the weights in a directory of the same model.

    Requests that are under way end first (vLLM) or go on with the new weights as the server does it
    (SGLang).

    Args:
        directory: an export, or another Hugging Face directory in safetensors; a link to it is
            resolved. The server must see it at the same path.
        server: the server's URL ("http://host:8000"), or in this process a `vllm.LLM`.
        timeout: seconds for each call.

    A server that wants a key (`--api-key`) gets that in the variable SMCKPT_SERVER_TOKEN.

    Raises:
        UsageError: it is no such directory, or no such server.
        StorageError: the server cannot be reached, or could not load the weights; the message has
            its answer. It may then serve neither model: load a whole one, or start it again.
    """
    began = time.perf_counter()
    model_path = os.path.realpath(path_on_disk(
        directory, "a server reads the weights of a disk here",
        "bring the directory to a disk that the server sees (smckpt apply)",
    ))  # fmt: skip
    folder = Folder(SourceFiles(), model_path)
    chosen = weight_files(folder)[0] if os.path.isdir(model_path) else {}
    if not chosen:
        raise UsageError(
            "no weights of a model are in the directory", path=model_path,
            remedy="pass what smckpt export or smckpt apply wrote",
        )  # fmt: skip
    loaded = {name for name in folder.files if name.endswith(".safetensors")}
    if INDEX in folder.files:
        loaded &= {*weight_map(folder, INDEX).values()}
    if loaded and loaded != {*chosen}:
        raise UsageError(
            f"the model is in {sorted(chosen)[:3]}, but a server would load {sorted(loaded)[:3]}",
            remedy="pass an export of the directory (smckpt export)", path=model_path,
        )  # fmt: skip
    if hasattr(server, "collective_rpc"):
        server.collective_rpc(
            "reload_weights", kwargs={"weights_path": model_path}, timeout=timeout
        )
        _refuse_cached(bool(server.reset_prefix_cache()), "the engine in this process")
        return ReloadReport("this process", VLLM, model_path, time.perf_counter() - began)
    if not isinstance(server, str) or urllib.parse.urlsplit(server).scheme not in ("http", "https"):
        raise UsageError(
            f"server={server!r}", remedy='pass a URL ("http://host:8000"), or a vllm.LLM'
        )
    client = _Client(server.rstrip("/"), timeout)
    kind = client.kind()
    (client.vllm if kind == VLLM else client.sglang)(model_path)
    return ReloadReport(client.url, kind, model_path, time.perf_counter() - began)


@dataclass(frozen=True)
class _Client:
    url: str
    timeout: float

    def kind(self) -> str:
        """
        Raises:
            UsageError: it has none of the calls.
        """
        answer = self._ask("GET", "/openapi.json")
        paths = answer.get("paths") if isinstance(answer, Mapping) else None
        found = [kind for kind, route in _ROUTES.items() if route in (paths or {})]
        if not found:
            raise UsageError(
                f"the server has none of the calls {', '.join(_ROUTES.values())}",
                remedy="start vLLM with VLLM_SERVER_DEV_MODE=1, or SGLang; both only where no "
                "stranger reaches the port",
                path=self.url,
            )
        return found[0]

    def vllm(self, model_path: str) -> None:
        """A prefix that is in the cache would be continued with the old weights' keys."""
        self._ask("POST", "/pause?mode=wait")
        try:
            self._ask(
                "POST", "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": model_path},
                 "timeout": self.timeout},
            )  # fmt: skip
            answer = self._ask("POST", "/reset_prefix_cache")
            _refuse_cached(not isinstance(answer, dict) or answer.get("success", True), self.url)
        except BaseException:
            with suppress(CheckpointError):
                self._ask("POST", "/resume")
            raise
        self._ask("POST", "/resume")

    def sglang(self, model_path: str) -> None:
        answer = self._ask(
            "POST", "/update_weights_from_disk", {"model_path": model_path, "flush_cache": True}
        )
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise self._failed("/update_weights_from_disk", json.dumps(answer))

    def _ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(_TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + route, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text = answer.read(_LIMIT)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(_LIMIT)
            raise self._failed(route, f"{error.code} {text.decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise self._failed(route, str(error)) from error
        try:
            return json.loads(text) if text else None
        except ValueError:
            return None

    def _failed(self, route: str, answer: str) -> StorageError:
        return StorageError(
            f"the server answered {route} with: {answer[:_SHOWN]}",
            remedy="look at the server's log; load a whole model, or start it again",
            path=self.url,
        )


def _refuse_cached(reset: bool, where: str) -> None:
    if not reset:
        raise StorageError(
            "the prefix cache of the old weights could not be dropped",
            remedy="let all requests end first, and reload again", path=where,
        )  # fmt: skip

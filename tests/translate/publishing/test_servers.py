"""Running servers load an export in place of what they serve, and drop what they have cached."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

import smckpt
from smckpt import errors, export_hf, reload_weights
from smckpt.cli.app import app
from tests.support.launch import free_port
from tests.support.limits import seconds
from tests.support.models import references as ref

VLLM, SGLANG = ("/collective_rpc",), ("/update_weights_from_disk", "/generate")


@contextmanager
def stand_in(
    routes: tuple[str, ...], answers: dict[str, tuple[int, Any]]
) -> Iterator[tuple[str, list[Any]]]:
    """A server with these routes. Yields the URL, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"paths": {route: {} for route in routes}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body, self.headers.get("Authorization")))
            self._answer(*answers.get(self.path, (200, {"success": True})))

        def _answer(self, code: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def exported(folder: Path, seed: int) -> tuple[Any, Path]:
    torch.manual_seed(seed)
    # vLLM's attention on a CPU takes heads of 32 and more
    model = ref.model("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.config.architectures = ["LlamaForCausalLM"]
    smckpt.save({"model": model.state_dict()}, checkpoint_id=folder / f"c{seed}")
    export_hf(folder / f"c{seed}", folder / f"hf{seed}", config=model.config)
    return model, folder / f"hf{seed}"


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("two")
    return [exported(folder, seed) for seed in (1, 2)]


def test_each_server_is_asked_in_its_own_terms(tmp_path, two, monkeypatch):
    place = str(two[0][1])
    link = tmp_path / "latest"
    link.symlink_to(place)
    monkeypatch.setenv("SMCKPT_SERVER_TOKEN", "key")
    with stand_in(VLLM, {}) as (vllm, said), stand_in(SGLANG, {}) as (sglang, told):
        report = reload_weights(link, f"{vllm}/", timeout=seconds(60))
        assert (report.kind, report.server, report.directory) == ("vLLM", vllm, place)
        assert [path for path, *_ in said] == [
            "/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume"
        ]  # fmt: skip
        assert said[1][1]["method"] == "reload_weights"
        assert said[1][1]["kwargs"] == {"weights_path": place}
        run = CliRunner().invoke(app, ["reload", str(link), vllm, sglang])
        assert run.exit_code == 0, run.output
        assert "(vLLM) has the weights of" in run.output and "(SGLang) has" in run.output
        body = {"model_path": place, "flush_cache": True}
        assert told == [("/update_weights_from_disk", body, "Bearer key")]


class Engine:
    """As `vllm.LLM` is called."""

    def __init__(self, empties: bool) -> None:
        self.empties = empties
        self.asked: list[Any] = []

    def collective_rpc(self, *given: Any, **named: Any) -> None:
        self.asked.append((given, named["kwargs"]))

    def reset_prefix_cache(self) -> bool:
        return self.empties


def test_an_engine_of_this_process_reloads(two):
    engine = Engine(True)
    reload_weights(two[0][1], engine)
    assert engine.asked == [(("reload_weights",), {"weights_path": str(two[0][1])})]
    with pytest.raises(errors.StorageError, match="prefix cache of the old weights"):
        reload_weights(two[0][1], Engine(False))


def test_what_a_server_refuses_is_told_and_it_goes_on(tmp_path, two):
    place = two[0][1]
    failures: list[tuple[tuple[str, ...], dict[str, tuple[int, Any]], str]] = [
        (VLLM, {"/collective_rpc": (500, "no such file")}, "collective_rpc with: 500 .*no such"),
        (VLLM, {"/reset_prefix_cache": (200, {"success": False})}, "prefix cache of the old"),
        (SGLANG, {SGLANG[0]: (400, {"success": False, "message": "shape"})}, "400 .*shape"),
        (SGLANG, {SGLANG[0]: (200, {"success": False, "message": "busy"})}, "with: .*busy"),
    ]
    for routes, answers, text in failures:
        with stand_in(routes, answers) as (url, asked):
            with pytest.raises(errors.StorageError, match=text):
                reload_weights(place, url, timeout=seconds(60))
            assert routes is SGLANG or asked[-1][0] == "/resume"
    with stand_in(("/v1/completions",), {}) as (url, asked):
        with pytest.raises(errors.UsageError, match="VLLM_SERVER_DEV_MODE=1"):
            reload_weights(place, url, timeout=seconds(60))
        assert not asked
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(errors.StorageError, match="openapi.json"):
            reload_weights(place, nobody, timeout=seconds(60))
    (tmp_path / "empty").mkdir()
    for directory, server, text in (
        (tmp_path / "empty", "http://a", "no weights of a model"),
        (tmp_path / "none", "http://a", "no weights of a model"),
        ("s3://bucket/hf", "http://a", "reads the weights of a disk"),
        (place, "localhost:8000", "server='localhost:8000'"), (place, 3, "server=3"),
    ):  # fmt: skip
        with pytest.raises(errors.UsageError, match=text):
            reload_weights(directory, server)


@pytest.mark.parametrize("odd", ["named by the config", "old index", "adapter"])
def test_a_directory_of_which_a_server_would_load_other_files_is_refused(tmp_path, two, odd):
    """A server does not ask the config. It said that it has the weights, and had others."""
    place = tmp_path / "hf"
    shutil.copytree(two[0][1], place)
    if odd == "named by the config":
        shutil.copy(place / "model.safetensors", place / "ema.safetensors")
        config = json.loads((place / "config.json").read_text())
        config["transformers_weights"] = "ema.safetensors"
        (place / "config.json").write_text(json.dumps(config))
    elif odd == "old index":
        shutil.copy(place / "model.safetensors", place / "model-00001-of-00001.safetensors")
        with safe_open(place / "model.safetensors", "pt") as names:
            where = dict.fromkeys(names.keys(), "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": where}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        shutil.copy(place / "model.safetensors", place / "adapter_model.safetensors")
    engine = Engine(True)
    with pytest.raises(errors.UsageError, match="a server would load"):
        reload_weights(place, engine)
    assert engine.asked == []
    export_hf(place, tmp_path / "again")
    reload_weights(tmp_path / "again", engine)
    assert engine.asked


# -- vLLM itself ---------------------------------------------------------------------------------

SERVER = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1",
}  # fmt: skip


def vllm_python() -> str:
    return os.environ.get("SMCKPT_VLLM_PYTHON") or pytest.skip("SMCKPT_VLLM_PYTHON is not set")


def greedy(model: Any) -> list[str]:
    """transformers' tokens."""
    prompt = torch.tensor([[3, 17, 5, 9]])
    made = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    return list(map(str, made[0].tolist()[4:]))


@pytest.mark.long
def test_a_server_of_vllm_gives_transformers_tokens_after_the_command(tmp_path, two):
    python = vllm_python()
    (one, first), (other, second) = two
    assert greedy(one) != greedy(other)
    port = free_port()
    # torchvision's build may lack its operators where there is no CUDA; no text model needs it
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["torchvision"] = None\n')
    environment = {**os.environ, **SERVER, "PYTHONPATH": str(tmp_path)}
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(first),
        "--served-model-name", "m", "--dtype", "float32", "--skip-tokenizer-init",
        "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "2",
        "--num-gpu-blocks-override", "16", "--port", str(port), "--host", "127.0.0.1",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{url}/health", server, tmp_path / "log")
        assert _tokens(url) == greedy(one)
        run = CliRunner().invoke(app, ["reload", str(second), url])
        assert run.exit_code == 0, run.output
        assert _tokens(url) == greedy(other)
    finally:
        server.terminate()
        server.wait(seconds(100))


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + seconds(900)
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=seconds(5)):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])


def _tokens(url: str) -> list[str]:
    body = {"model": "m", "prompt": [3, 17, 5, 9], "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "detokenize": False}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=seconds(200)) as answer:
        found = json.loads(answer.read())
    return list(map(str, found["choices"][0]["token_ids"]))

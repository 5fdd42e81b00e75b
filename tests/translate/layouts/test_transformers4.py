"""What is exported loads in transformers 4 as well, whole and with the same logits.

Needs an interpreter with transformers 4.57, which SMCKPT_TRANSFORMERS4_PYTHON names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smckpt import Parallel, export_hf
from tests.support import interpreters
from tests.support.models import families, next_families, references, vision
from tests.support.models.references import V, each_rank, on_disk

FIRST = (
    "llama", "llama_biased", "mistral", "qwen2", "qwen3", "gpt_neox", "mixtral", "qwen3_moe",
)  # fmt: skip
FAMILIES = (*FIRST, *families.FAMILIES, *next_families.FAMILIES, *vision.FAMILIES)
LOADS = """
import json, sys
from pathlib import Path
import torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    wanted = torch.load(folder / "logits.pt")
    try:
        given = torch.load(folder / "given.pt")
        kind = "AutoModelForImageTextToText" if len(given) > 1 else "AutoModelForCausalLM"
        model, info = getattr(transformers, kind).from_pretrained(
            folder / "hf", output_loading_info=True, dtype=torch.float32,
            # with the other one, 4 leaves out Gemma 2's soft cap; 5 knows
            attn_implementation="eager" if folder.name == "gemma2" else None,
        )
        with torch.no_grad():
            apart = (model.eval()(**given).logits - wanted).abs().max().item()
        lists = {name: sorted(map(str, names)) for name, names in info.items()}
        found[folder.name] = {"lists": lists, "apart": apart}
    except Exception as error:
        found[folder.name] = {"error": repr(error)}
print(json.dumps(found))
"""


def exported(family: str, folder: Path) -> None:
    """From two ranks with Megatron's names."""
    seen = family in vision.FAMILIES
    source: Any = vision if seen else references if family in FIRST else families
    source = next_families if family in next_families.FAMILIES else source
    torch.manual_seed(0)
    model = source.model(family)
    (folder / "state").mkdir(parents=True)
    state = (vision.released if seen else on_disk)(model, folder / "state")
    if seen:
        cuts = each_rank(lambda r, e: vision.bridge(family, state, 2, r), 2)
    elif source is references:
        cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    elif family in families.WIDE_NORMS:
        cuts = each_rank(lambda r, e: families.hf_tp(family, model, 2, r), 2)
    else:
        cuts = each_rank(lambda r, e: source.mcore(family, state, 2, r), 2)
    paths = [folder / f"rank{r}.safetensors" for r in range(2)]
    for path, cut in zip(paths, cuts, strict=True):
        save_file({n: t.contiguous().clone() for n, t in cut.items()}, path)
    export_hf(paths, folder / "hf", parallel=Parallel(tp=2), config=model.config)
    given = vision.picture(family) if seen else {"input_ids": torch.arange(40).reshape(2, 20) % V}
    torch.save(given, folder / "given.pt")
    with torch.no_grad():
        torch.save(model(**given).logits, folder / "logits.pt")


def swapped(folder: Path) -> None:
    """Layers 0 and 1 have each other's queries: names and shapes are right."""
    at = folder / "hf" / "model.safetensors"
    state = load_file(at)
    one, two = (f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))
    save_file({**state, one: state[two], two: state[one]}, at, {"format": "pt"})


def lost(folder: Path) -> None:
    at = folder / "hf" / "model.safetensors"
    state = load_file(at)
    del state["model.layers.1.self_attn.q_proj.weight"]
    save_file(state, at, {"format": "pt"})


def in_another_order(folder: Path) -> None:
    """The ranks' files, of which no name or number says that they are in the wrong order."""
    shutil.rmtree(folder / "hf")
    first, second = (folder / f"rank{r}.safetensors" for r in range(2))
    first.rename(folder / "b.safetensors")
    second.rename(folder / "a.safetensors")
    paths = [folder / "a.safetensors", folder / "b.safetensors"]
    export_hf(paths, folder / "hf", parallel=Parallel(tp=2), config=references.config("llama"))


# what is wrong → the family, and how it is made wrong
WRONG: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a swapped tensor": ("llama", swapped),
    "a lost tensor": ("llama", lost),
    "ranks in another order": ("llama", in_another_order),
}
IN_MEMORY = "names in memory"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What transformers 4 made of each family's export; one process for all of them."""
    python = interpreters.transformers4()
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        exported(family, root / family)
    for name, (family, spoil) in WRONG.items():
        exported(family, root / name)
        spoil(root / name)
    shutil.copytree(root / "mixtral", root / IN_MEMORY)
    shutil.rmtree(root / IN_MEMORY / "hf")
    model = references.model("mixtral")
    model.save_pretrained(root / IN_MEMORY / "hf", save_original_format=False)
    told = interpreters.run(python, "-c", LOADS, root, timeout=250)
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_4_loads_it_with_the_same_logits(found, judged, family):
    assert "error" not in found[family], found[family]
    assert not any(found[family]["lists"].values()), found[family]["lists"]
    assert found[family]["apart"] <= 1e-5
    layout = "hf_tp" if family in families.WIDE_NORMS else "mcore_te"
    judged(family, layout, exports=["transformers 4"], at="2")


@pytest.mark.parametrize("what", [*WRONG, IN_MEMORY])
def test_transformers_4_sees_what_is_wrong(found, what):
    """The same comparison does not pass: by the keys that it reports, or by the logits alone."""
    assert "error" not in found[what], found[what]
    told = {name for name, keys in found[what]["lists"].items() if keys}
    keys = {"a lost tensor": {"missing_keys"}, IN_MEMORY: {"missing_keys", "unexpected_keys"}}
    assert told == keys.get(what, set())
    assert found[what]["apart"] > 1e-3

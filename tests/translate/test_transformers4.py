"""What is exported loads in transformers 4 as well, whole and with the same logits.

Needs an interpreter with transformers 4.57, which SMCKPT_TRANSFORMERS4_PYTHON names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from smckpt import export_hf
from tests.support import families, interpreters, references
from tests.support.references import V, each_rank, on_disk

FIRST = (
    "llama", "llama_biased", "mistral", "qwen2", "qwen3", "gpt_neox", "mixtral", "qwen3_moe",
)  # fmt: skip
LOADS = """
import json, sys
from pathlib import Path
import torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    wanted = torch.load(folder / "logits.pt")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "hf", output_loading_info=True, dtype=torch.float32,
            # with the other one, 4 leaves out Gemma 2's soft cap; 5 knows
            attn_implementation="eager" if folder.name == "gemma2" else None,
        )
        tokens = torch.arange(40).reshape(2, 20) % int(sys.argv[2])
        with torch.no_grad():
            apart = (model.eval()(tokens).logits - wanted).abs().max().item()
        lists = {name: sorted(map(str, names)) for name, names in info.items()}
        found[folder.name] = {"lists": lists, "apart": apart}
    except Exception as error:
        found[folder.name] = {"error": repr(error)}
print(json.dumps(found))
"""


def exported(family: str, folder: Path) -> None:
    """From two ranks with Megatron's names."""
    source: Any = references if family in FIRST else families
    torch.manual_seed(0)
    model = source.model(family)
    (folder / "state").mkdir(parents=True)
    state = on_disk(model, folder / "state")
    if source is references:
        cuts = each_rank(lambda r, e: references.mcore(state, 2, r), 2)
    elif family in families.WIDE_NORMS:
        cuts = each_rank(lambda r, e: families.hf_tp(family, model, 2, r), 2)
    else:
        cuts = each_rank(lambda r, e: families.mcore(family, state, 2, r), 2)
    paths = [folder / f"rank{r}.safetensors" for r in range(2)]
    for path, cut in zip(paths, cuts, strict=True):
        save_file({n: t.contiguous().clone() for n, t in cut.items()}, path)
    export_hf(paths, folder / "hf", tp=2, config=model.config)
    with torch.no_grad():
        torch.save(model(torch.arange(40).reshape(2, 20) % V).logits, folder / "logits.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What transformers 4 made of each family's export; one process for all of them."""
    python = interpreters.transformers4()
    root = tmp_path_factory.mktemp("families")
    for family in (*FIRST, *families.FAMILIES):
        exported(family, root / family)
    told = interpreters.run(python, "-c", LOADS, root, str(V), timeout=250)
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    return result


@pytest.mark.parametrize("family", [*FIRST, *families.FAMILIES])
def test_transformers_4_loads_it_with_the_same_logits(found, family, judged):
    assert "error" not in found[family], found[family]
    assert not any(found[family]["lists"].values()), found[family]["lists"]
    assert found[family]["apart"] <= 1e-5
    layout = "hf_tp" if family in families.WIDE_NORMS else "mcore_te"
    judged(family, layout, exports=["transformers 4"], at="2")

"""The rotary parameters of an export are those of the config in transformers 4 and 5, whichever
version wrote it: the frequencies of both are compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from smckpt.errors import UsageError
from smckpt.translate.config import read_config
from tests.support import interpreters
from tests.support.limits import seconds
from tests.support.models.rope_forms import NEW, OLD, TINY

FREQUENCIES = """
import json, sys
from pathlib import Path
import transformers
from transformers import AutoConfig, AutoModel
def buffers(folder):
    config = AutoConfig.from_pretrained(folder)
    kinds = {}
    if config.model_type == "qwen2_5_vl_text":
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel as kind
        model = kind._from_config(config)
        scaling = getattr(config, "rope_parameters", None) or config.rope_scaling
        kinds["sections"] = scaling["mrope_section"]
    else:
        model = AutoModel.from_config(config)
    found = [(n, b) for n, b in model.named_buffers() if n.endswith("inv_freq")
             and "original" not in n]
    values = {tuple(round(float(x), 9) for x in b.flatten()) for _, b in found}
    return {"freq": sorted(map(list, values)), **kinds}
found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        found[folder.name] = buffers(folder)
    except Exception as error:
        found[folder.name] = {"error": repr(error)}
print(json.dumps(found))
"""


def frequencies(python: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", FREQUENCIES, str(folder)],
        capture_output=True,
        text=True,
        timeout=seconds(600),
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """As each version reads what is written, and as the version that wrote it reads its own."""
    import sys

    older = interpreters.transformers4()
    own5, own4, written = (tmp_path_factory.mktemp(name) for name in ("own5", "own4", "written"))
    cases = [(f"new {n}", {**TINY, **own, "rope_parameters": rope}, own5)
             for n, (own, rope) in NEW.items()]  # fmt: skip
    cases += [(f"old {n}", {**TINY, **own}, own4) for n, own in OLD.items()]
    for name, values, own in cases:
        for folder, made in ((own, values), (written, None)):
            if made is None:
                settings = read_config(values)
                assert settings is not None
                made = settings.complete("float32")
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(made))
    owners = {**frequencies(sys.executable, own5), **frequencies(older, own4)}
    return owners, frequencies(sys.executable, written), frequencies(older, written)


@pytest.mark.parametrize("name", [*(f"new {n}" for n in NEW), *(f"old {n}" for n in OLD)])
def test_both_versions_turn_by_the_same_angles(found, name):
    owners, five, four = (versions[name] for versions in found)
    assert "error" not in owners, owners
    assert five == owners
    if name == "new longrope, phimoe":  # version 4 computes them in `forward`
        assert four == {"freq": []}
    else:
        assert four == owners


@pytest.mark.parametrize("name", NEW)
def test_what_servers_read_names_the_type(name):
    """mlx-lm and remote code look for `type`, others for `rope_type`."""
    own, rope = NEW[name]
    settings = read_config({**TINY, **own, "rope_parameters": rope})
    assert settings is not None
    scaling = settings.complete(None)["rope_scaling"]
    flat = rope.get("full_attention", rope)
    if flat["rope_type"] == "default" and "mrope_section" not in flat:
        assert scaling is None
    else:
        assert scaling["type"] == ("mrope" if "mrope_section" in flat else flat["rope_type"])


@pytest.mark.parametrize(
    ("more", "fits"),
    [({}, True), ({"factor": 4.0}, True), ({"factor": 16.0}, False),
     ({"original_max_position_embeddings": 1}, True),
     ({"attention_factor": 1.3}, False), ({"attention_factor": (1 + 1 / 3) ** 0.5}, True)],
)  # fmt: skip
def test_attention_that_version_4_cannot_scale_so_is_refused(more: Any, fits: bool) -> None:
    """The export had both versions' keys, by which both scale attention otherwise, in silence."""
    kind, rope = NEW["longrope, phi3"]
    config = read_config({**TINY, **kind, "rope_parameters": {**rope, **more}})
    assert config is not None
    if fits:
        assert config.complete(None)["rope_scaling"]["type"] == "longrope"
        return
    with pytest.raises(UsageError, match="scales attention by"):
        config.complete(None)

"""Draw the docs' pictures: `python -m tests.support.tools.pictures [browse] [costs]`.

`browse.png`: the page of `smckpt browse` about a run of two FSDP ranks, in Chromium. `costs.png`:
the table of saves and loads in docs/benchmarks.md. (`train.png` is what `./dev train` draws.)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch
from torch import nn

import smckpt
from smckpt import CheckpointManager
from smckpt.integrations.telemetry import JsonLines
from tests.support.launch import ROOT, run_ranks
from tests.support.limits import seconds
from tests.support.tools.browser import browser, chromium

IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1080, 980
STEPS = 200
COLORS = ("#1f77b4", "#c7c7c7")
PAIRS = {  # rows of the table: name in the picture → (ours, DCP's)
    "training waits for async_save": ("`async_save` blocks", "DCP `async_save` blocks"),
    "save": ("`save`", "DCP `save` (not durable)"),
    "load, from the page cache": (
        "`load`, cached, every byte checked", "DCP `load`, cached, nothing checked",
    ),
}  # fmt: skip


def a_run(folder: str) -> None:
    """Two ranks learn to tell which of two halves of a text is the larger."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(64, 64), encoder, nn.Flatten(), nn.Linear(64 * 16, 2))
    for part in (*encoder.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    smckpt.add_sink(JsonLines(f"{folder}/telemetry.jsonl"))
    with CheckpointManager(f"{folder}/run", interval=20) as manager:
        state = {"model": model, "optimizer": optimizer}
        for step in range(manager.restore(into=state) + 1, STEPS + 1):
            text = torch.randint(64, (32, 16))
            larger = (text[:, :8].sum(1) > text[:, 8:].sum(1)).long()
            loss = nn.functional.cross_entropy(model(text), larger)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if manager.should_save(step):
                manager.save(step, state)


def browse(out: Path) -> None:
    """The page about a run, with its newest step's histograms."""
    program = chromium()
    assert program is not None, "no chromium here: apt-get install chromium"
    with tempfile.TemporaryDirectory() as folder, browser(program, "--hide-scrollbars") as page:
        run_ranks(a_run, 2, folder)
        file = Path(folder, "page.html")
        options = ["--verify", "--histograms", "--telemetry", f"{folder}/telemetry.jsonl"]
        subprocess.run(
            [sys.executable, "-m", "smckpt.cli", "browse", "run", "--out", str(file), *options],
            cwd=folder, check=True, timeout=seconds(120),
        )  # fmt: skip
        file.write_text(file.read_text().replace(f"{folder}/", ""))  # its name changes each time
        page.open(file.as_uri())
        out.write_bytes(page.picture(WIDTH, HEIGHT))


def costs(out: Path) -> None:
    """Bars of the table of saves and loads in docs/benchmarks.md."""
    text = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Saves and loads")[2]
    rows = re.findall(r"^\| \**(.+?)\** \| ([\d.]+) \(([\d.]+)–([\d.]+)\) ", text, re.M)
    found = {name: [float(one) for one in figures] for name, *figures in rows}
    bars = [(label, *(found[name] for name in names)) for label, names in PAIRS.items()]
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
        for at, (_, *pair) in enumerate(bars):
            for off, color, (median, least, most) in zip((0.2, -0.2), COLORS, pair, strict=True):
                place = len(bars) - at + off
                axes.barh(place, median, 0.36, color=color)
                axes.plot([least, most], [place, place], color="#333333", linewidth=1.2)
                axes.annotate(f"  {median:.2f} s", (max(median, most), place), va="center")
        axes.set_yticks([len(bars) - at for at in range(len(bars))], [bar[0] for bar in bars])
        axes.set_xlabel("seconds: the median of seven turns, the least and the most")
        axes.legend(
            [Patch(color=color) for color in COLORS],
            ["smckpt: durable, every byte checked", "torch 2.13 DCP: neither"],
            frameon=False, loc="lower right",
        )  # fmt: skip
        figure.savefig(out, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    for make in (browse, costs):
        if sys.argv[1:] in ([], [make.__name__]):
            make(IMAGES / f"{make.__name__}.png")

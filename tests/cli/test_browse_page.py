"""The page of `smckpt browse` in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smckpt.cli.browse import page_of
from tests.cli.test_browse import FORGED, browsed, change_last_byte, line, save
from tests.support.saves import Group, hybrid, state_of
from tests.support.tools.browser import Browser, browser, chromium

pytestmark = pytest.mark.skipif(
    chromium() is None,
    reason="no chromium here: apt-get install chromium (.ci/run does so where it is root)",
)


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser(chromium() or "") as page:
        yield page


@pytest.fixture(autouse=True)
def no_errors(page: Browser) -> Iterator[None]:
    """No script fails, and the policy of the page refuses nothing that it does."""
    page.told.clear()
    yield
    assert page.told == []


def text_of(page: Browser, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).innerText"))


def go(page: Browser, to: str) -> None:
    """Follow a link of the page, as its reader does."""
    page.evaluate(
        f"new Promise(done => {{ addEventListener('hashchange', () => done(1), {{once: true}});"
        f" document.querySelector('a[href=\"{to}\"]').click(); }})"
    )


def test_a_reader_finds_steps_tensors_files_and_the_cause_of_damage(
    page: Browser, tmp_path: Path
) -> None:
    save(tmp_path / "a", 10, state=state_of(hybrid((0, 1, 2, 3), 2), tensors=150))
    change_last_byte(save(tmp_path / "a", 20))
    left = Group(tmp_path / "a" / "30", (0, 1), session="d" * 12)
    left.lease()
    left.write_rank(1, 0, step=30)
    file = tmp_path / "events.jsonl"
    file.write_text(line(directory=str(tmp_path / "a" / "10"), step=10))
    browsed(tmp_path, tmp_path / "page.html", "--verify", "--histograms", "--telemetry", file)
    page.open((tmp_path / "page.html").as_uri())
    seen = text_of(page, "main")
    assert "1 unfinished, 1 damaged, 1 whole" in seen and "Saves over time" in seen
    assert "A restore takes Step 10" in seen
    assert [word in text_of(page, "nav") for word in ("Step 10", "Step 20", "Step 30")] == [
        True
    ] * 3
    go(page, "#/step/1")
    seen = text_of(page, "main")
    assert (
        "differ from what was written" in seen and "smckpt repair" in seen and "From byte" in seen
    )
    go(page, "#/step/2")
    for word in ("hybrid shard degree", "0–3", "every byte read", "LOCAL"):
        assert word in text_of(page, "main")
    go(page, "#/step/2/tensors")
    assert "152 tensors" in text_of(page, "main caption")
    assert page.evaluate("document.querySelectorAll('tbody tr').length") == 100
    page.evaluate("[...document.querySelectorAll('.pager button')].at(-1).click()")
    assert page.evaluate("document.querySelectorAll('tbody tr').length") == 52
    assert page.evaluate("document.querySelectorAll('tbody tr svg[role=img]').length") > 0
    page.evaluate(
        "{ const box = document.querySelector('main input'); box.value = 'layers.149 FLOAT32';"
        " box.dispatchEvent(new Event('input')); }"
    )
    assert "1 tensor, 240 B" in text_of(page, "main caption")
    assert "model.layers.149.weight" in text_of(page, "main tbody")
    go(page, "#/step/2/ranks")
    name = next((tmp_path / "a" / "10").glob("data-*r00003-0.safetensors")).name
    assert name in text_of(page, "main") and "node1" in text_of(page, "main")
    go(page, "#/step/2/timeline")
    assert "rank 0 · node0" in page.evaluate("document.querySelector('main svg').textContent")


def test_names_and_values_of_a_forged_checkpoint_are_shown_and_never_run(
    page: Browser, tmp_path: Path
) -> None:
    save(
        tmp_path / FORGED.replace("/", "∕"),
        1,
        versions={FORGED: FORGED},
        metadata={FORGED: FORGED},
        host=lambda _: FORGED,
        objects={FORGED: {"path": [FORGED], "value": FORGED}},
    )
    file = tmp_path / "events.jsonl"
    file.write_text(
        line(host=FORGED, error=FORGED, outcome="failed", queue=FORGED, alarms=[FORGED])
    )
    told = browsed(tmp_path, tmp_path / "page.html", "--telemetry", file)
    told["rows"][0][0] = told["rows"][0][4] = FORGED  # as a name of a tensor
    told["notes"] = [FORGED]
    told["telemetry"]["events"][0]["at"] = 0
    (tmp_path / "page.html").write_bytes(page_of(told))
    page.open((tmp_path / "page.html").as_uri())
    for tab in (
        "",
        "#/step/0",
        *(f"#/step/0/{t}" for t in ("tensors", "ranks", "values", "timeline")),
    ):
        if tab:
            go(page, tab)
        assert "onerror=alert(1)" in text_of(page, "body")
        assert page.evaluate("[...document.querySelectorAll('img, script')].length") == 2
        assert "smckpt" in page.evaluate("document.title")


def test_a_script_that_got_into_the_page_would_not_run(page: Browser, tmp_path: Path) -> None:
    """The second wall, if the first one had a hole."""
    hole = page_of({}).replace(b"</body>", b"<script>window.ran = 1</script></body>")
    (tmp_path / "page.html").write_bytes(hole)
    page.open((tmp_path / "page.html").as_uri())
    assert page.evaluate("window.ran") is None
    assert any("Content Security Policy" in told for told in page.told)
    page.told.clear()


def test_the_theme_follows_the_reader(page: Browser, tmp_path: Path) -> None:
    save(tmp_path, 1)
    browsed(tmp_path, tmp_path / "page.html")
    page.open((tmp_path / "page.html").as_uri())
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.evaluate("document.querySelector('header button').click()")
    assert page.evaluate(colour) != before
    assert text_of(page, "header button").endswith(("Dark", "Light"))


def test_each_control_has_a_name_and_each_picture_a_text(page: Browser, tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    browsed(tmp_path, tmp_path / "page.html", "--histograms")
    for place in ("", "#/step/0", "#/step/0/tensors", "#/step/0/ranks"):
        page.open((tmp_path / "page.html").as_uri() + place)
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input, select, button, svg, a, th')].filter(n => !("
            "n.getAttribute('aria-label') || n.textContent.trim() ||"
            " (n.closest('label') && n.closest('label').textContent.trim()))).length"
        )
        assert unnamed == 0
        assert page.evaluate("document.documentElement.lang") == "en"
        assert page.evaluate("document.querySelectorAll('main, nav, header, h1').length") == 4


@pytest.mark.long
def test_ten_thousand_tensors_times_a_hundred_steps_stay_usable(
    page: Browser, tmp_path: Path
) -> None:
    many = state_of(hybrid((0, 1, 2, 3), 2), tensors=10_000, rows=2)
    first = save(tmp_path / "run", 0, state=many)
    for step in range(1, 100):
        shutil.copytree(first, tmp_path / "run" / str(step))
    told: Any = browsed(tmp_path / "run", tmp_path / "page.html")
    assert len(told["steps"]) == 100 and all("shared" in step for step in told["steps"])
    assert os.path.getsize(tmp_path / "page.html") < 4 << 20
    page.open((tmp_path / "page.html").as_uri() + "#/step/50/tensors")
    assert "10,002 tensors" in text_of(page, "main caption")
    assert page.evaluate("document.querySelectorAll('*').length") < 5000

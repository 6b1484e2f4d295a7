"""Takes the pictures of the console in docs/pictures anew: `python -m tests.console.pictures`. Needs chromium."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import PIL.Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.console.served import Served, engine

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
MODELS = ("demo", "demo:pirate", "demo:shout")
MAX_BYTES = 150_000


def playground(page: Page) -> None:
    """Three models side by side, and what else could have stood at one place."""
    for name in MODELS:
        page.get_by_label(name, exact=True).check()
    page.get_by_label("seed", exact=True).fill("7")
    page.get_by_label("max_tokens", exact=True).fill("48")
    page.locator("#run").click()
    expect(page.locator("#summary")).to_contain_text("written, in", timeout=60_000)
    page.mouse.move(0, 0)


def live(page: Page) -> None:
    """A replica at work."""
    page.evaluate(
        """async (body) => {
          const headers = {"content-type": "application/json"};
          const ask = () => fetch("v1/completions", {method: "POST", headers, body});
          for (let number = 0; number < 14; number++) {
            await Promise.all([ask(), ask(), ask()]);
            if (number === 2) location.hash = "#live";
          }
          void Promise.all([ask(), ask(), ask(), ask(), ask()]);
          await new Promise((resolve) => setTimeout(resolve, 1100));
        }""",
        '{"model": "demo", "prompt": "Once upon a time", "max_tokens": 60, "n": 2, "ignore_eos": true}',
    )


def keep(picture: bytes, file: Path) -> None:
    """In few colours, which a page has anyway."""
    image = PIL.Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE)
    image.save(file, optimize=True)
    assert file.stat().st_size <= MAX_BYTES, f"{file.name} has {file.stat().st_size} bytes"


def take(browser: Browser, url: str) -> None:
    for name, show, scheme, height in (("console", playground, "light", 830), ("console-live", live, "dark", 720)):
        page = browser.new_page(viewport={"width": 1240, "height": height}, color_scheme=scheme)
        page.goto(f"{url}/console")
        expect(page.locator("#chips input")).to_have_count(4)
        show(page)
        keep(page.screenshot(), FOLDER / f"{name}.png")
        page.close()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    served = Served(engine)
    with sync_playwright() as playwright:
        found = os.environ.get("CHROMIUM") or shutil.which("chromium")
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        take(launched, served.url)
        launched.close()
    served.close()

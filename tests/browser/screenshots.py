"""Pictures of the playground for the documentation: `python -m tests.browser.screenshots`.

The default model reads 12,000 tokens and answers: a minute on two cores.
"""

from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, expect

from tests.browser.chromium import chromium
from tests.serving import DEADLINE, real_server

FOLDER = Path(__file__).parents[2] / "docs" / "images"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def answer_a_long_text(page: Page) -> None:
    """Have the page show the plan of a long text and the answer to it."""
    expect(page.locator("#count")).to_contain_text("tokens")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_role("button", name="Show me 12,000 tokens").click()
    expect(page.locator("#plan-name")).to_contain_text("yarn")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_contain_text(";")
    expect(page.locator("#running")).to_have_text("0")


def main() -> None:
    """Write playground-light.png and playground-dark.png."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=2 * DEADLINE * 1000)
    with real_server(kv_cache_memory="1GiB") as server, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=2)
        page.goto(server.url)
        answer_a_long_text(page)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=FOLDER / f"playground-{scheme}.png", full_page=True)
        page.close()


if __name__ == "__main__":
    main()

"""The playground as somebody uses it who has a browser, a keyboard or a screen reader.

No page may write an error to the console or ask another host for anything; where the server is to refuse something, the
test says so, for Chromium logs that too.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'ropewalk[browser]'")

from playwright.sync_api import Browser, Page, Request, expect

from tests.browser.chromium import NAMES, chromium, find_chromium
from tests.serving import DEADLINE, FakeServer, HttpServer, error_of, fake_server, real_server

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason=f"needs a browser: none of {', '.join(NAMES)} is on the PATH"),
]

NATIVE = 64
"""Native length of the fake model, whose tokens are characters."""
TIMES, DASH = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
expect.set_options(timeout=DEADLINE * 1000)


@dataclass
class Observed:
    """What a page did.

    Attributes:
        page: the page.
        refusals: HTTP statuses that the test expects.
        errors: what it wrote to the console.
        hosts: where it sent requests.
    """

    page: Page
    refusals: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note_host)

    def _note(self, kind: str, text: str) -> None:
        status = re.match(r"Failed to load resource: the server responded with a status of (\d+)", text)
        if kind in ("error", "warning") and not (status and int(status[1]) in self.refusals):
            self.errors.append(text)

    def _note_host(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    with fake_server(sse_keepalive_seconds=1) as running:
        yield running


@pytest.fixture
def server(shared_server: FakeServer) -> Iterator[FakeServer]:
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture(scope="module")
def embedded(embedded_model_folder: Path) -> Iterator[HttpServer]:
    with real_server(model=str(embedded_model_folder), kv_cache_memory="1GiB") as running:
        yield running


@pytest.fixture
def observed(browser: Browser) -> Iterator[Observed]:
    """A page of its own; at the test's end it has written no error and asked its own server alone."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    observed = Observed(context.new_page())
    yield observed
    origin = urlsplit(observed.page.url).netloc
    context.close()
    assert observed.errors == []
    assert observed.hosts == {origin}


@pytest.fixture
def page(observed: Observed, server: FakeServer) -> Page:
    """The page of the fake server, its model told."""
    observed.page.goto(server.url)
    expect(observed.page.locator("#plan-name")).to_have_text("Unscaled")
    return observed.page


def ask(page: Page, text: str, **fields: str) -> None:
    """Fill the form, the prompt as it stands, and wait until its plan is told."""
    page.get_by_label("Send as").select_option("Text")
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ").capitalize()).fill(value)
    page.get_by_label("Prompt").fill(text)
    expect(page.locator("#count")).to_have_text(f"{len(text)} tokens")


def marks(page: Page) -> Counter[str]:
    """How many pairs the picture shows of each kind."""
    shown = page.locator("#picture .mark").evaluate_all("marks => marks.map((mark) => mark.classList[1])")
    return Counter(shown)


@contextmanager
def held(server: FakeServer, page: Page) -> Iterator[None]:
    """Generate, and the engine held before its first step."""
    with server.gate.closed():
        page.get_by_role("button", name="Generate").click()
        server.gate.wait_until_reached()
        yield


class TestAnswer:
    def test_tokens_stream_in_as_they_are_generated(self, server: FakeServer, page: Page) -> None:
        server.writes("Hello, rope!")
        ask(page, "Hi")
        with held(server, page):
            expect(page.locator("#status")).to_have_text("Reading 2 tokens")
            for text in ("H", "He", "Hel"):
                server.gate.pass_one_step()
                expect(page.locator("#answer")).to_have_text(text)
            expect(page.locator("#status")).to_have_text("Writing")
            expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
            expect(page.locator("#running")).to_have_text("1")
        expect(page.locator("#answer")).to_have_text("Hello, rope!")
        expect(page.locator("#status")).to_have_text("13 tokens; the model ended it")
        expect(page.locator("#running")).to_have_text("0")
        expect(page.locator("#first-token")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
        expect(page.locator("#speed")).to_have_text(re.compile(r"^[\d.]+$"))

    def test_stop_ends_the_request_and_keeps_what_came(self, server: FakeServer, page: Page) -> None:
        server.writes("Hello, rope!")
        ask(page, "Hi")
        with held(server, page):
            server.gate.pass_one_step()
            expect(page.locator("#answer")).to_have_text("H")
            page.get_by_role("button", name="Stop").click()
            expect(page.locator("#status")).to_have_text("Stopped")
        server.wait_until_idle()
        assert server.samples()["ropewalk_request_success_total{finished_reason=cancelled}"] >= 1
        expect(page.locator("#answer")).to_have_text("H")
        expect(page.get_by_role("button", name="Generate")).to_have_attribute("aria-disabled", "false")

    def test_growth_is_told(self, server: FakeServer, page: Page) -> None:
        server.writes("x" * 90)
        ask(page, "a" * 40, max_tokens="100")
        expect(page.locator("#reason")).to_contain_text("grows to factor 1.25 beyond 64 tokens")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#status")).to_contain_text(f"grew to yarn {TIMES} 2.5 in 4 re-rotations")


class TestPlan:
    def test_it_follows_what_is_typed(self, server: FakeServer, page: Page) -> None:
        ask(page, "a" * 20, max_tokens="8")
        expect(page.locator("#plan-name")).to_have_text("Unscaled")
        assert marks(page) == {"kept": 4}
        ask(page, "a" * 100, max_tokens="8")
        expect(page.locator("#plan-name")).to_have_text(f"yarn {TIMES} 2")
        planned = server.client.post("/v1/rope/plan", json={"prompt_tokens": 100, "max_tokens": 8}).json()
        assert page.locator("#reason").text_content() == planned["reason"]
        assert page.locator("#covers").text_content() == "covers 128 tokens"
        assert marks(page) == Counter(pair["kind"] for pair in planned["pairs"])

    def test_a_wish_is_granted(self, page: Page) -> None:
        page.get_by_label("Scheme").select_option("linear")
        page.get_by_label("Factor").select_option(f"{TIMES} 4")
        expect(page.locator("#plan-name")).to_have_text(f"linear {TIMES} 4")
        assert marks(page) == {"interpolated": 4}

    def test_the_picture_has_the_numbers_of_the_plan_in_their_order(self, server: FakeServer, page: Page) -> None:
        ask(page, "a" * 100, max_tokens="8")
        expect(page.locator("#plan-name")).to_have_text(f"yarn {TIMES} 2")
        pairs = server.client.post("/v1/rope/plan", json={"prompt_tokens": 100, "max_tokens": 8}).json()["pairs"]

        def heights(line: str) -> list[float]:
            points = page.locator(f"#picture .{line}").get_attribute("points") or ""
            return [float(point.split(",")[1]) for point in points.split()]

        unscaled, scaled = heights("native-line"), heights("plan-line")
        per_octave = (
            unscaled[0] - unscaled[1]
        )  # of the fake model's geometry each wavelength is ten times the one before
        for pair, before, after in zip(pairs, unscaled, scaled, strict=True):
            slowdown = pair["plan_wavelength"] / pair["wavelength"]
            assert 10 ** ((before - after) / per_octave) == pytest.approx(slowdown, rel=1e-6)
        label = page.locator("#picture").get_attribute("aria-label") or ""
        assert "4 pairs" in label
        assert "Native length 64 tokens, this request 108" in label

    def test_at_12_000_tokens_the_default_model_is_scaled(self, observed: Observed, embedded: HttpServer) -> None:
        page = observed.page
        page.goto(embedded.url)
        expect(page.locator("#plan-name")).to_have_text("Unscaled")
        assert marks(page) == {"kept": 32}
        page.get_by_role("button", name="Show me 12,000 tokens").click()
        expect(page.locator("#plan-name")).to_have_text(f"yarn {TIMES} 1.5")
        tokens = int((page.locator("#count").text_content() or "").removesuffix(" tokens").replace(",", ""))
        assert 12_000 <= tokens < 12_100
        planned = embedded.client.post("/v1/rope/plan", json={"prompt_tokens": tokens, "max_tokens": 128}).json()
        assert page.locator("#reason").text_content() == planned["reason"]
        assert marks(page) == Counter(pair["kind"] for pair in planned["pairs"])
        assert set(marks(page)) == {"kept", "blended", "interpolated"}

    def test_the_default_model_answers_a_chat(self, observed: Observed, embedded: HttpServer) -> None:
        page = observed.page
        page.goto(embedded.url)
        question = "What is the capital of France? Answer with one word."
        page.get_by_label("Prompt").fill(question)
        page.get_by_label("Max tokens").fill("12")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#status")).to_contain_text("tokens; ")
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}
        answer = embedded.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert page.locator("#answer").text_content() == answer


class TestRefusals:
    def refusal(self, server: FakeServer, path: str, body: dict[str, Any]) -> str:
        error = error_of(server.client.post(path, json=body))
        return f"{error['message']} ({error['code']})"

    def test_they_are_told_in_the_servers_words_at_the_field(
        self, observed: Observed, server: FakeServer, page: Page
    ) -> None:
        observed.refusals = {400}
        ask(page, "Hi")
        page.get_by_label("Temperature").fill("-1")
        page.get_by_role("button", name="Generate").click()
        said = self.refusal(server, "/generate", {"prompt": "Hi", "temperature": -1})
        assert "temperature" in said
        expect(page.get_by_role("alert")).to_have_text(said)
        expect(page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_label("Temperature")).to_have_attribute("aria-describedby", "error")
        page.get_by_label("Temperature").fill("0")
        expect(page.locator("#error")).to_be_empty()
        expect(page.get_by_label("Temperature")).not_to_have_attribute("aria-invalid", "true")

    def test_a_length_that_no_plan_covers_is_told_while_it_is_typed(
        self, observed: Observed, server: FakeServer, page: Page
    ) -> None:
        observed.refusals = {400}
        ask(page, "Hi")
        page.get_by_label("Max tokens").fill("9999")
        said = self.refusal(server, "/v1/rope/plan", {"prompt_tokens": 2, "max_tokens": 9999})
        assert "256" in said
        expect(page.get_by_role("alert")).to_have_text(said)

    def test_a_model_without_a_chat_template_asks_to_send_text(self, observed: Observed) -> None:
        observed.refusals = {400}
        page = observed.page
        with fake_server(chat_template=None) as server:
            page.goto(server.url)
            expect(page.get_by_role("alert")).to_contain_text("the model has no chat template")
            expect(page.get_by_label("Send as")).to_have_attribute("aria-invalid", "true")
            page.get_by_label("Send as").select_option("Text")
            expect(page.locator("#plan-name")).to_have_text("Unscaled")
            expect(page.locator("#error")).to_be_empty()

    def test_a_server_that_is_gone_is_told(self, observed: Observed) -> None:
        with fake_server() as server:
            observed.page.goto(server.url)
            expect(observed.page.locator("#running")).to_have_text("0")
        observed.page.get_by_role("button", name="Generate").click()
        expect(observed.page.get_by_role("alert")).to_have_text("the server cannot be reached")
        expect(observed.page.locator("#running")).to_have_text(DASH)
        assert all("ERR_CONNECTION_REFUSED" in error for error in observed.errors)
        observed.errors.clear()


class TestKey:
    def test_it_is_asked_for_and_kept_in_the_tab_alone(self, observed: Observed) -> None:
        observed.refusals = {401}
        page = observed.page
        with fake_server(api_key="right", metrics_need_key=True) as server:
            page.goto(server.url)
            expect(page.get_by_role("alert")).to_contain_text("a valid key is needed")
            for key in ("wrong", "right"):
                page.get_by_label("API key").fill(key)
                page.get_by_label("API key").press("Enter")
            expect(page.locator("#plan-name")).to_have_text("Unscaled")
            expect(page.locator("#running")).to_have_text("0")
            expect(page.locator("#error")).to_be_empty()
            stored = "[Object.values(sessionStorage), localStorage.length, document.cookie]"
            assert page.evaluate(stored) == [["right"], 0, ""]
            page.reload()
            expect(page.locator("#plan-name")).to_have_text("Unscaled")
            assert "right" not in page.url


class TestForEverybody:
    def test_the_keyboard_is_enough_and_shows_where_it_is(self, server: FakeServer, page: Page) -> None:
        server.writes("Hello, rope!")

        def focused() -> str:
            return str(page.evaluate("document.activeElement.id"))

        order = (
            "prompt",
            "send-as",
            "max-tokens",
            "temperature",
            "scheme",
            "factor",
            "generate",
            "stop",
            "long",
            "answer",
        )
        for name in order:
            page.keyboard.press("Tab")
            assert focused() == name
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        for _ in range(len(order) - order.index("generate") - 1):
            page.keyboard.press("Shift+Tab")
        assert focused() == "generate"
        with server.gate.closed():
            page.keyboard.press("Enter")
            server.gate.wait_until_reached()
            assert focused() == "generate"
            page.keyboard.press("Tab")
            page.keyboard.press("Space")
            expect(page.locator("#status")).to_have_text("Stopped")
            assert focused() == "stop"
        page.get_by_label("Prompt").focus()
        page.keyboard.type("!")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer")).to_have_text("Hello, rope!")

    def test_only_the_status_is_read_out_not_each_token(self, page: Page) -> None:
        live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
        assert live.evaluate_all("elements => elements.map((element) => element.id)") == ["error", "status"]
        expect(page.get_by_role("region", name="Answer")).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("Wavelengths of 4 pairs"))).to_be_visible()

    @pytest.mark.parametrize("width", [320, 360, 768, 1280, 2560])
    def test_it_fits_every_width(self, page: Page, width: int) -> None:
        page.set_viewport_size({"width": width, "height": 800})
        ask(page, "a" * 100)
        expect(page.locator("#plan-name")).to_have_text(re.compile("yarn"))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = "elements => elements.filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"
        assert page.locator("button, label, dd, dt, #status, #reason").evaluate_all(cut) == []
        texts = "elements => elements.map((e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
        for left, right in page.locator("#picture text").evaluate_all(texts):
            assert 0 <= left < right <= width

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_every_text_stands_out_from_its_ground(
        self, observed: Observed, page: Page, scheme: Literal["light", "dark"]
    ) -> None:
        observed.refusals = {400}
        page.emulate_media(color_scheme=scheme)
        ask(page, "a" * 100, max_tokens="9999")
        expect(page.get_by_role("alert")).not_to_be_empty()
        found = page.evaluate(TEXT_COLOURS)
        assert len(found) > 25
        for text, colour, ground in found:
            assert contrast(colour, ground) >= 4.5, text  # WCAG 2, level AA, text of any size

    def test_both_schemes_differ(self, page: Page) -> None:
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            grounds.append(luminance([int(number) for number in re.findall(r"\d+", colour)]))
        assert grounds[0] > 0.8
        assert grounds[1] < 0.05

    def test_nothing_moves_where_that_is_not_wanted(self, server: FakeServer, page: Page) -> None:
        ask(page, "Hi")
        moving = "getComputedStyle(document.getElementById('status'), '::before').animationName"
        with held(server, page):
            expect(page.locator("#status")).not_to_be_empty()
            assert page.evaluate(moving) == "none"
            page.emulate_media(reduced_motion="no-preference")
            assert page.evaluate(moving) == "breathe"
            page.get_by_role("button", name="Stop").click()


TEXT_COLOURS = """
() => {
  const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const isText = (element) =>
    element.checkVisibility() &&
    element.ariaDisabled !== "true" &&
    (["INPUT", "TEXTAREA", "SELECT"].includes(element.tagName) ||
      [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()));
  return [...document.body.querySelectorAll("*:not(svg *):not(option)")]
    .filter(isText)
    .map((element) => [element.id || element.textContent, rgb(getComputedStyle(element).color), ground(element)]);
}
"""
"""Each element with text of its own, its colour and that of what it stands on."""


def luminance(colour: list[int]) -> float:
    """Relative luminance of an sRGB colour, 0 to 1, as WCAG 2 defines it."""
    shares = [part / 255 for part in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[int], other: list[int]) -> float:
    """Contrast ratio of two colours, 1 to 21, as WCAG 2 defines it."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)

"""The page at / in a real browser, over the toy target: what it shows is what the endpoint says.

Needs Chromium (or Chrome) and its chromedriver; skipped where there is none.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from tests.toy_endpoint import DEADLINE_S, Served
from tests.toy_folder import save_toy_target
from tests.toy_target import HalfRight

pytest.importorskip("selenium", reason="no selenium: pip install the dev extra")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.page_screenshot import BrowserError, fill, open_browser, run_and_wait, set_view

KEY = "sk-toy"
# HalfRight's rounds keep one draft of three and add the bonus: after the first token eleven rounds, and a twelfth whose
# bonus the limit cuts. The response's tau counts it all the same; what was seen on the way comes to less.
TOKENS, ROUNDS, TAU = 24, 12, 2.0


@contextmanager
def listening(served: Served) -> Iterator[str]:
    """The app behind a socket of this machine; its base URL."""
    server = uvicorn.Server(uvicorn.Config(served.app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert served.engine.close(deadline_s=0)


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Page:
    """The open page, as a person sees and uses it."""

    def __init__(self, browser, url: str):
        self.browser, self.url = browser, url
        browser.get(url)

    def find(self, element_id: str):
        return self.browser.find_element(By.ID, element_id)

    def wait(self, condition) -> None:
        WebDriverWait(self.browser, DEADLINE_S, 0.05).until(lambda _: condition())

    def ask(self, prompt: str, tokens: int = TOKENS, **settings: str) -> None:
        self.fill(prompt=prompt, **{"max-tokens": str(tokens)}, **settings)
        run_and_wait(self.browser, DEADLINE_S)

    def fill(self, **settings: str) -> None:
        fill(self.browser, settings)

    def tokens(self, pane: str) -> list[dict]:
        """Text, id, origin and classes of a pane's tokens, in their order."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} .token`)].map("
            "t => ({text: t.textContent, id: Number(t.dataset.id), origin: t.dataset.origin, classes: t.className}))",
            pane,
        )

    def text(self, pane: str) -> str:
        return "".join(token["text"] for token in self.tokens(pane))

    def figures(self, pane: str) -> dict[str, str]:
        cells = self.browser.find_elements(By.CSS_SELECTOR, f"#{pane} [data-figure], #{pane} [data-count]")
        return {(cell.get_attribute("data-figure") or cell.get_attribute("data-count")): cell.text for cell in cells}

    def complaints(self) -> list[str]:
        """What the browser's console holds since it was last asked."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] != "INFO"]


@pytest.fixture(scope="module")
def browser():
    try:
        opened = open_browser(1200, 800)
    except BrowserError as error:
        pytest.skip(str(error))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def served(toy_target_dir) -> Served:
    return Served(toy_target_dir, make_drafter=HalfRight)


@pytest.fixture(scope="module")
def url(served) -> Iterator[str]:
    served.model.describe_drafter = lambda: {"name": "half-right", "path": "/drafters/toy/v7", "placement": "colocated"}
    with listening(served) as url:
        yield url


@pytest.fixture
def page(browser, url) -> Page:
    browser.get_log("browser")  # of the tests before
    page = Page(browser, url)
    page.wait(lambda: "toy" in page.find("served").text)
    return page


def chat(url: str, prompt: str, **options) -> dict:
    body = {"model": "toy", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": TOKENS}
    return httpx.post(f"{url}/v1/chat/completions", json=body | options, timeout=DEADLINE_S).json()


def test_both_answers_with_the_figures_of_the_api(page, url):
    assert page.find("served").text == "toy · drafter half-right · v7 · colocated"
    page.ask("hello")
    answer = chat(url, "hello")
    spec = answer["metrics"]["speculative_decoding"]
    assert answer["usage"]["completion_tokens"] == TOKENS
    assert (spec["rounds"], spec["tau"]) == (ROUNDS, TAU)
    assert page.text("drafted") == page.text("plain") == answer["choices"][0]["message"]["content"]
    drafted, plain = page.tokens("drafted"), page.tokens("plain")
    assert [t["id"] for t in drafted] == [t["id"] for t in plain]
    origins = Counter(t["origin"] for t in drafted)
    assert origins == {"plain": 1, "draft": spec["num_accepted_draft_tokens"], "bonus": spec["rounds"] - 1}
    assert all({"token", t["origin"]} <= set(t["classes"].split()) for t in drafted + plain)
    assert {t["origin"] for t in plain} == {"plain"}
    shown = page.figures("drafted")
    assert (shown["tau"], shown["rounds"]) == (f"{spec['tau']:.2f}", str(spec["rounds"]))
    assert {name: int(shown[name]) for name in origins} == origins
    assert float(shown["speed"]) > 0
    assert shown["first"].endswith(" s")
    assert page.figures("plain")["passes"] == str(TOKENS)
    assert f"Both texts are equal ({TOKENS} tokens)" in page.find("status").text
    assert page.find("speedup").text.endswith("×")
    assert page.complaints() == []


def test_sampled_with_a_seed_and_a_system_text(page, url):
    page.ask("abc", seed="21", temperature="0.9", system="be brief")
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
    answer = chat(url, "", messages=system, seed=21, temperature=0.9)
    assert page.text("drafted") == page.text("plain") == answer["choices"][0]["message"]["content"]
    assert "\n" in page.text("drafted")  # kept as it is
    page.ask("abc", seed="", temperature="0.9")
    assert page.text("drafted") != page.text("plain")
    assert "without a seed" in page.find("status").text


def test_tokens_tell_what_they_are_by_pointer_and_by_keyboard(page):
    page.find("compare").click()
    page.fill(prompt="hello", **{"max-tokens": str(TOKENS)})
    page.find("prompt").send_keys(Keys.CONTROL, Keys.ENTER)  # and not the button
    page.wait(lambda: len(page.tokens("drafted")) == TOKENS and page.find("run").is_enabled())
    assert page.tokens("plain") == []
    tokens = page.tokens("drafted")
    answer = page.browser.find_element(By.CSS_SELECTOR, "#drafted .answer")
    answer.send_keys(Keys.END)
    about = page.find("tip").text
    assert f"id {tokens[-1]['id']}" in about
    assert f"accepted draft 1, pass {ROUNDS + 1}" in about
    answer.send_keys(Keys.ARROW_LEFT)
    assert f"id {tokens[-2]['id']}\nbonus" in page.find("tip").text
    answer.send_keys(Keys.ESCAPE)
    assert not page.find("tip").is_displayed()
    first = page.browser.find_element(By.CSS_SELECTOR, "#drafted .token")
    ActionChains(page.browser).move_to_element(first).perform()
    assert f"{json.dumps(tokens[0]['text'], ensure_ascii=False)}  id {tokens[0]['id']}\nplain" in page.find("tip").text


def test_text_of_a_model_is_never_markup(page, url, served, monkeypatch):
    monkeypatch.setattr(served.model, "describe_drafter", lambda: {"name": "<b>bold</b>", "path": "<img src=x>"})
    page.find("compare").click()
    page.ask("hello")
    assert page.find("served").text == "toy · drafter <b>bold</b> · <img src=x>"
    inside = page.browser.execute_script("return document.querySelectorAll('.token *, #served *').length")
    assert inside == 0
    refused = page.browser.execute_script("try { document.body.innerHTML = '<p>' } catch (error) { return error.name }")
    assert refused == "TypeError"  # the browser itself takes no markup from strings here


@pytest.mark.parametrize(("pane", "quick_rounds"), [("drafted", 20), ("plain", 130)])
def test_stop_frees_the_slot(page, url, served, monkeypatch, pane, quick_rounds):
    step, rounds, before = served.inner.step, itertools.count(), served.inner.stats.emitted_tokens

    def slow_from_then_on():  # the drafted answer takes 101 rounds, the plain one 200 more: Stop comes before the end
        if next(rounds) > quick_rounds:
            time.sleep(0.1)
        return step()

    monkeypatch.setattr(served.inner, "step", slow_from_then_on)
    page.fill(prompt="stop me", **{"max-tokens": "200"})
    page.find("run").click()
    page.wait(lambda: page.tokens(pane))
    page.find("stop").click()
    page.wait(page.find("run").is_enabled)
    assert page.find("status").text == "Stopped."
    idle = 'num_requests_running{model_name="toy",replica=""} 0.0'
    wait_until(lambda: idle in httpx.get(f"{url}/metrics").text)
    assert len(page.tokens(pane)) < 200
    assert served.inner.stats.emitted_tokens - before < (200 if pane == "drafted" else 400)


def test_errors_are_one_line_with_their_parameter(page):
    page.ask("hello", tokens=1000)
    line = page.find("error").text
    assert line.startswith("max_tokens: the context holds 256 tokens")
    assert "\n" not in line
    assert page.tokens("drafted") == []
    page.find("compare").click()
    page.ask("hello")
    assert not page.find("error").is_displayed()
    assert len(page.tokens("drafted")) == TOKENS


COLOURS = """const style = (selector) => getComputedStyle(document.querySelector(selector));
return arguments[0].map(([text, behind]) => [style(text).color, style(behind).backgroundColor])
"""
READ = [
    *[(f"#drafted .{origin}.token", f"#drafted .{origin}.token") for origin in ("draft", "bonus", "plain")],
    *[("#served", "html"), ("#drafted dt", "#drafted"), ("#status", "#verdict"), ("#run", "#run"), ("label", "#ask")],
]


def contrast(colours: list[str]) -> float:
    """WCAG's ratio of two opaque colours, as browsers write them: rgb(r, g, b)."""
    lightness = []
    for colour in colours:
        assert colour.startswith("rgb("), colour
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lightness.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lightness) + 0.05) / (min(lightness) + 0.05)


def test_it_can_be_read_in_both_schemes_and_on_a_phone(page):
    page.ask("hello")
    seen = []
    for dark in (False, True):
        set_view(page.browser, 360, 740, dark=dark)
        seen.append(page.browser.execute_script(COLOURS, READ))
        ratios = {pair: contrast(colours) for pair, colours in zip(READ, seen[-1], strict=True)}
        assert min(ratios.values()) >= 4.5, ratios
        width = page.browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= 360
        drafted, plain = page.find("drafted").rect, page.find("plain").rect
        assert plain["y"] >= drafted["y"] + drafted["height"]
    assert seen[0] != seen[1]
    set_view(page.browser, 1200, 800)


def test_without_a_drafter_and_without_a_chat_template(browser, tmp_path):
    folder = save_toy_target(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    served = Served(folder, make_drafter=None)
    with listening(served) as url:
        page = Page(browser, url)
        page.wait(lambda: "no drafter" in page.find("served").text)
        page.ask("hello", system="ignored")
        body = {"model": "toy", "prompt": "hello", "temperature": 0, "max_tokens": TOKENS}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).json()
        assert page.text("drafted") == answer["choices"][0]["text"]
        assert page.tokens("plain") == []  # there is nothing to compare with
        assert "no chat template" in page.find("status").text


def test_a_key_is_asked_for_and_kept_for_the_tab(browser, toy_target_dir):
    served = Served(toy_target_dir, make_drafter=HalfRight, api_keys=[KEY])
    with listening(served) as url:
        page = Page(browser, url)
        page.wait(page.find("key").is_displayed)
        assert "API key is missing or wrong" in page.find("error").text
        page.ask("hello", key="wrong")
        assert page.find("key").is_displayed()
        assert browser.execute_script("return sessionStorage.length") == 0
        page.ask("hello", key=KEY)
        assert len(page.tokens("drafted")) == TOKENS
        assert not page.find("key").is_displayed()
        browser.refresh()
        page.wait(lambda: "toy" in page.find("served").text)
        kept = browser.execute_script("return [{...sessionStorage}, localStorage.length, document.cookie]")
        assert ([*kept[0].values()], *kept[1:]) == ([KEY], 0, "")

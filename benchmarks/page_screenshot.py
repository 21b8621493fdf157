"""A picture of the page at / of a running endpoint, once its two answers to a prompt are there.

In: a base URL and a prompt. Out: a PNG. Needs the dev extra, Chromium (or Chrome) and its chromedriver:
    draftloop serve --target smollm2 --drafter drafter &
    python benchmarks/page_screenshot.py http://127.0.0.1:8000 "What is 7 * 12?"
"""

from __future__ import annotations

import argparse
import base64
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

RESULT = Path(__file__).parent / "results" / "page.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVER = "chromedriver"


class BrowserError(RuntimeError):
    """There is no browser to open; one line with the mend."""


def open_browser(width: int, height: int, *, dark: bool = False) -> webdriver.Chrome:
    """A headless Chromium that reaches nothing but this machine, and keeps the page's log. Raises BrowserError."""
    found, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which(DRIVER)
    if found is None or driver is None:
        raise BrowserError(f"no Chromium or no {DRIVER} on the PATH; install both (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for argument in (
        "--headless=new",
        "--no-sandbox",  # containers have no user namespaces to make one of
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(executable_path=driver))
    set_view(browser, width, height, dark=dark)
    return browser


def set_view(browser: webdriver.Chrome, width: int, height: int, *, dark: bool = False) -> None:
    """The size of the window's inside in CSS pixels, and the colour scheme that the user prefers."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def fill(browser: webdriver.Chrome, settings: dict[str, str]) -> None:
    """Type into fields of the page, named by their ids."""
    for name, value in settings.items():
        field = browser.find_element(By.ID, name)
        field.clear()
        field.send_keys(value)


def run_and_wait(browser: webdriver.Chrome, timeout_s: float) -> None:
    """Press Run and wait until it can be pressed again: both answers are there, or an error."""
    run = browser.find_element(By.ID, "run")
    run.click()
    WebDriverWait(browser, timeout_s, 0.05).until(lambda _: run.is_enabled())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("prompt")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--max-tokens", default="256")
    parser.add_argument("--runs", type=int, default=2, help="the last is shown; the first ones warm the engine up")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    given = parser.parse_args()
    with open_browser(given.width, given.height, dark=given.dark) as browser:
        browser.get(given.base_url)
        WebDriverWait(browser, given.timeout_s, 0.05).until(lambda b: "·" in b.find_element(By.ID, "served").text)
        fill(browser, {"prompt": given.prompt, "temperature": "0", "max-tokens": given.max_tokens})
        for _ in range(given.runs):
            run_and_wait(browser, given.timeout_s)
        error = browser.find_element(By.ID, "error").text
        if error:
            raise SystemExit(f"the endpoint refused: {error}")
        said = browser.find_element(By.ID, "status").text
        browser.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
        png = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    given.output.write_bytes(png)
    print(f"{given.output}: {len(png) / 1e3:.0f} kB; {said}")


if __name__ == "__main__":
    main()

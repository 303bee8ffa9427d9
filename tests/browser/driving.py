"""Short words for what a person does with a page."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import roost

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def start_browser(width: int = 1440, height: int = 1000) -> Any:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


@dataclass
class Opened:
    """A page in the browser, and the plan that it shows."""

    driver: Any
    plan: roost.Plan
    path: Path

    def load(self) -> None:
        self.driver.get_log("browser")  # what earlier pages said
        self.driver.get("about:blank")
        self.driver.get(self.path.as_uri())

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.driver.execute_script("return document.querySelector(arguments[0]).innerText", selector)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def hover(self, selector: str) -> None:
        ActionChains(self.driver).move_to_element(self.one(selector)).perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def search(self, text: str) -> None:
        box = self.one("#search")
        box.clear()
        box.send_keys(text)
        box.send_keys(Keys.ENTER)

    def style(self, selector: str, name: str) -> str:
        return self.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name)

    def until(self, selector: str, name: str, value: str) -> None:
        """Waits until something has a style; fails where that does not come."""
        WebDriverWait(self.driver, 60).until(lambda _: self.style(selector, name) == value)

    def screenshot(self, path: Path) -> None:
        """Takes a picture; on a machine that is very busy the browser may need a second try."""
        for attempt in range(3):
            try:
                self.driver.save_screenshot(str(path))
                return
            except TimeoutException:
                if attempt == 2:
                    raise

    @property
    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

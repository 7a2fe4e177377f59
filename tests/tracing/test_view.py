"""The page of a recording, in a browser and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import opened, screenshots, wait

from kvloom.paging import Events, PagePool, PageTable, PrefixTree
from kvloom.tracing.page import page_of, write_page
from kvloom.tracing.replay import Lookup, replay

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with opened(tmp_path) as driver:
        yield driver


def text_of(ids: list[int]) -> str:
    return HOSTILE if ids[0] == 9 else "".join(f" word{i}" for i in ids)


def recorded() -> Events:
    """Three requests of two tenants; two share pages at the end, and the first gave way to the third."""
    pool = PagePool(6)
    tree = PrefixTree(pool, 2)
    events = tree.record()
    for text, salt in (([1, 2, 3, 4, 5, 6, 7, 8], ""), ([1, 2, 3, 4], "b"), ([9, 9, 8, 8], "")):
        refs = tree.match(text, salt)
        events.name(HOSTILE)
        for ref in tree.insert(text, refs + pool.take(len(text) // 2 - len(refs)), salt):
            pool.release(ref)
    for _ in range(2):
        found = tree.match([9, 9, 8, 8])
        table = PageTable(pool, 2)
        table.adopt(found)
    tree.match([1, 2, 3, 4, 5, 6, 7, 8])
    return events


def test_nothing_in_a_text_ends_the_script() -> None:
    text = page_of(recorded().lines(decode=text_of))
    assert text.count("</script>") == 1 and "<img" not in text and "<script>document" not in text
    data = text.split("const DATA = ")[1].split(";\nconst EVENTS")[0]
    assert HOSTILE in {x[3] for x in json.loads(data)["nodes"]}


@pytest.mark.browser
def test_a_browser_shows_the_recording(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def text(name: str) -> str:
        return str(browser.find_element(By.ID, name).text)

    def button(label: str) -> Any:
        found = browser.find_elements(By.CSS_SELECTOR, "#requests button")
        return next(x for x in found if x.text == label)

    events, output = recorded(), screenshots(tmp_path)
    write_page(events.lines(tokens=False, decode=text_of), tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri())
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#requests tr")) == 6)
    assert browser.title == "kvloom: pages over time"  # what a text says is not run
    assert text("count-shared") == "shared 2" and HOSTILE in text("tree")
    assert text("clock").startswith(f"{len(events)} of {len(events)}, ")
    assert "For request" in browser.find_element(By.TAG_NAME, "main").text
    assert text("evictions").split() == ["#3", "#1", "2"]
    assert "no salt" in text("tenants") and "found of the full pages asked for" in text("tenants")

    button("#6").send_keys(Keys.ENTER)
    wait(lambda: "Request 6" in text("detail"))
    assert "more would have kept it" in text("detail") and "for request 3" in text("detail")
    assert button("#6").get_attribute("aria-pressed") == "true"
    browser.save_screenshot(str(output / "view-light.png"))
    button("#5").click()
    wait(lambda: "Request 5" in text("detail"))
    assert "hit" in text("detail")

    scrubber = browser.find_element(By.ID, "scrubber")
    scrubber.send_keys(Keys.HOME)
    wait(lambda: text("clock").startswith("0 of "))
    assert text("event") == "Nothing has happened yet." and text("count-free") == "free 0"
    scrubber.send_keys(Keys.ARROW_RIGHT)
    wait(lambda: text("event") == "The pool has 6 pages.")
    scrubber.send_keys(Keys.END)
    wait(lambda: text("count-shared") == "shared 2")
    browser.find_element(By.TAG_NAME, "body").send_keys("[")
    wait(lambda: text("clock").startswith(f"{len(events) - 1} of "))

    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.find_element(By.ID, "map").send_keys(Keys.END, Keys.HOME, Keys.ENTER)
    wait(lambda: "The story of page 0" in text("detail"))
    assert "takes page" in text("detail")
    browser.save_screenshot(str(output / "view-dark.png"))
    browser.set_window_size(500, 1400)
    assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    browser.save_screenshot(str(output / "view-narrow.png"))
    assert not browser.get_log("browser")


@pytest.mark.browser
def test_any_moment_of_a_long_recording_is_that_of_its_events(browser: Any, tmp_path: Path) -> None:
    lookups = [
        Lookup(float(i), "", 8, [i % 7, *(1000 + i % 50 * 20 + j for j in range(1 + i % 5))])
        for i in range(1200)
    ]
    events = replay(lookups, 60)
    assert len(events) > 5000
    write_page(events.lines(tokens=False), tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri())
    same = browser.execute_script("""
        const moments = [0, 1, 999, 1000, 1001, 2500, 4999, 3000, 10, EVENTS.length, EVENTS.length - 1];
        return moments.every(moment => {
            seek(moment);
            const plain = emptyState();
            while (plain.index < moment) apply(plain);
            return JSON.stringify(plain) === JSON.stringify(state);
        });""")
    assert same
    assert not browser.get_log("browser")

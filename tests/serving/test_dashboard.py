"""The dashboard, in a browser and without one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from browsers import opened, screenshots, wait
from oracles.serving import PROMPT, Served, paced, served

from kvloom.serving.endpoints import dashboard


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=("secret", "other"), config={"num_blocks": 800}) as running:
        yield running


@pytest.fixture
def busy(server: Served) -> Iterator[Served]:
    """A server with six long answers: four of one key share their prefix, and one of another has its own.

    Each look at its state lets it compute a step, so that none ends while a test looks, on any machine.
    """
    looked, stop, state_of = threading.Event(), threading.Event(), dashboard.state_of

    def ask(number: int) -> None:
        with (
            server.client("secret" if number < 4 else "other") as client,
            client.completions.create(
                model="bundled",
                prompt=(f"# {time.time_ns()}\n" if number == 5 else "") + PROMPT * 3,
                max_tokens=1800,
                temperature=2,
                seed=number,
                stream=True,
                extra_body={"ignore_eos": True},
            ) as stream,
        ):
            for _ in stream:
                if stop.is_set():
                    return

    def wait_for_look() -> None:
        looked.wait()
        looked.clear()

    def look(*args: Any) -> dict[str, Any]:
        looked.set()
        return state_of(*args)

    def begin(*numbers: int) -> None:
        asked.extend(pool.submit(ask, number) for number in numbers)
        while server.session.report().running < len(asked):
            assert not any(x.done() for x in asked)
            looked.set()
            time.sleep(0.005)

    asked: list[Future[None]] = []
    with ThreadPoolExecutor(6) as pool:
        try:
            with paced(server.session, wait_for_look), mock.patch.object(dashboard, "state_of", look):
                begin(0)
                begin(*range(1, 6))  # of which three find its prefix
                yield server
        finally:
            stop.set()
            looked.set()  # for the step that waits
    for x in asked:
        x.result()
    server.until(running=0, active=0)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return screenshots(tmp_path)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with opened(tmp_path) as driver:
        yield driver


def test_the_page_loads_nothing_from_elsewhere(server: Served) -> None:
    text = dashboard.page()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert server.send("GET", "/dashboard", key="secret") == (200, text.encode())


def test_the_state_has_pages_and_reasons_and_no_text_and_no_salt(busy: Served) -> None:
    status, answer = busy.send("GET", "/dashboard/state", key="secret")
    state = json.loads(answer)
    assert status == 200 and state["model"] == "bundled" and state["kv"] == "int8:g64" and state["alive"]
    assert len(state["pages"]) == state["report"]["num_pages"] and set(state["pages"]) <= set("fase")
    groups = sorted(request["group"] for request in state["requests"])
    assert len(groups) == 6 and groups.count(groups[0]) in (2, 4) and len(set(groups)) == 2
    for request in state["requests"]:
        ends = [0, *(end for _, _, end in request["runs"])]
        assert [first for _, first, _ in request["runs"]] == ends[:-1] and ends == sorted(ends)
        assert all(state["pages"][page] in "as" for page in request["pages"])
    assert state["pages"].count("s") > 0
    salts = {request.salt for request in busy.session.manager.page_map().requests}
    assert salts and not any(salt.encode() in answer for salt in salts) and b"import" not in answer


@pytest.mark.parametrize(
    ("num_prompt", "num_found", "num_tokens", "runs"),
    [
        (40, 0, 50, [("unknown", 0, 16), ("behind", 16, 32), ("partial", 32, 40), ("new", 40, 50)]),
        (40, 16, 40, [("found", 0, 16), ("unknown", 16, 32), ("partial", 32, 40)]),
        (40, 32, 41, [("found", 0, 32), ("partial", 32, 40), ("new", 40, 41)]),
        (48, 32, 49, [("found", 0, 32), ("last", 32, 48), ("new", 48, 49)]),
        (48, 0, 20, [("unknown", 0, 16), ("behind", 16, 20)]),
        (5, 0, 6, [("partial", 0, 5), ("new", 5, 6)]),
        (16, 0, 16, [("last", 0, 16)]),
    ],
)
def test_each_page_of_a_request_has_a_reason(
    num_prompt: int, num_found: int, num_tokens: int, runs: list[tuple[str, int, int]]
) -> None:
    assert dashboard.runs_of(num_prompt, num_found, num_tokens, 16) == runs


@pytest.mark.browser
def test_a_browser_shows_the_session_live(browser: Any, busy: Served, output: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def text(name: str) -> str:
        return str(browser.find_element(By.ID, name).text)

    address = f"127.0.0.1:{busy.port}/dashboard"
    browser.get(f"http://{address}")
    assert "kvloom" not in browser.title  # the browser asks for a key before there is a page
    browser.get(f"http://any:secret@{address}")
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#requests tr:not(.ended)")) == 6)
    wait(lambda: text("speed") not in ("\u2013", "0.0"))
    wait(lambda: text("queue") == "6 + 0")
    assert text("model") == "bundled" and text("offline") == ""
    assert text("kept") == "pages of 16 tokens, kept as int8:g64, batch invariant"
    assert "#" in text("sharing") and "shared" in text("legend")
    first = text("finished"), text("preemptions")
    wait(lambda: (text("finished"), text("preemptions")) != first)  # it is live

    rows = browser.find_elements(By.CSS_SELECTOR, "#requests tr")
    alone = next(row for row in rows if " 0 %" in row.text)
    button = alone.find_element(By.TAG_NAME, "button")
    button.send_keys(Keys.ENTER)
    wait(lambda: "Request #" in text("detail"))
    assert "nobody computed them yet" in text("detail") and "After a missed page" in text("detail")
    assert "Generated." in text("detail")
    assert button.get_attribute("aria-pressed") == "true"
    time.sleep(1.2)
    assert browser.switch_to.active_element == button  # new states leave the focus where it is
    browser.save_screenshot(str(output / "dashboard-light.png"))

    browser.find_element(By.ID, "map").send_keys(Keys.END, Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert text("hint").startswith("Page ")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
    wait(lambda: "Select one" in text("detail"))
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.find_element(By.ID, "map").send_keys(Keys.HOME, Keys.ENTER)
    wait(lambda: "Request #" in text("detail"))
    browser.save_screenshot(str(output / "dashboard-dark.png"))
    browser.set_window_size(500, 1400)
    time.sleep(0.7)
    browser.save_screenshot(str(output / "dashboard-narrow.png"))
    width = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert width <= 0  # nothing is wider than the window
    problems = [x for x in browser.get_log("browser") if "401" not in x["message"]]
    assert not problems


@pytest.mark.browser
def test_a_request_that_ended_goes_below_the_running_ones_and_keeps_the_focus(
    browser: Any, server: Served
) -> None:
    from selenium.webdriver.common.by import By

    address = f"127.0.0.1:{server.port}/dashboard"
    browser.get(f"http://{address}")
    browser.get(f"http://any:secret@{address}")
    wait(lambda: browser.find_element(By.ID, "speed").text != "\u2013")
    browser.find_element(By.ID, "pause").click()  # states come from here alone

    def show(*names: str) -> list[str]:
        """Rows in order, when these requests run; ended ones in brackets."""
        requests = [{"id": x, "group": "a", "pages": [], "runs": [["new", 0, 1]]} for x in names]
        browser.execute_script("take({...state, requests: arguments[0]})", requests)
        rows = browser.find_elements(By.CSS_SELECTOR, "#requests tr")
        return [
            f"({row.get_attribute('data-id')})"
            if row.get_attribute("class") == "ended"
            else row.get_attribute("data-id")
            for row in rows
        ]

    browser.execute_script("seen.clear()")
    assert show("a", "b", "c") == ["c", "b", "a"]
    button = browser.find_element(By.CSS_SELECTOR, "tr[data-id=c] button")
    browser.execute_script("arguments[0].focus()", button)
    assert show("a", "b") == ["b", "a", "(c)"]
    assert browser.switch_to.active_element == button
    assert show("a", "b", "d") == ["d", "b", "a", "(c)"]
    assert show("d") == ["d", "(c)", "(b)", "(a)"]
    assert browser.switch_to.active_element == button
    browser.execute_script("document.activeElement.blur(); seen.clear()")
    assert show("a", "b", "c") == ["c", "b", "a"]
    button = browser.find_element(By.CSS_SELECTOR, "tr[data-id=a] button")
    browser.execute_script("arguments[0].focus()", button)
    assert show("a", "b") == ["b", "a", "(c)"]
    assert browser.switch_to.active_element == button
    browser.execute_script("document.activeElement.blur()")
    assert show("d") == ["d", "(c)", "(b)", "(a)"]
    assert show("e") == ["e", "(d)", "(c)", "(b)", "(a)"]

"""The page of a real server, in Chromium: its text is that of the API, and its figures are those of the server."""

import shutil

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]
sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROMPT = "Up betimes and to my office,"


@pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is installed")
def test_the_page_shows_the_text_of_the_api_and_which_tokens_the_draft_guessed(url):
    body = {"messages": [{"role": "user", "content": PROMPT}], "seed": 1, "temperature": 0.7, "max_tokens": 160}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    complaints = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.get_by_role("button", name=PROMPT).click()
        page.get_by_role("button", name="Copy").wait_for(timeout=60_000)
        spoken = page.locator("#spoken").text_content()
        num_marked = page.locator(".text .accepted, .text .recovered, .text .bonus").count()
        num_accepted = page.locator(".text .accepted").count()
        page.get_by_text("ready").first.wait_for()
        page.locator("#times dd").first.wait_for()
        has_demo = page.locator("#demo").is_visible()
        browser.close()
    assert spoken == f"Answer: {answer['choices'][0]['message']['content']}"
    assert 0 < num_accepted < num_marked <= answer["usage"]["completion_tokens"]
    assert not has_demo
    assert complaints == []

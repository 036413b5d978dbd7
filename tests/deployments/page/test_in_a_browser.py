"""The page in Chromium, over a fake server: what a visitor sees, hears and can do without a mouse."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.page.fake_server import STORY, Fake, serving_fake

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is installed")
sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

DESKTOP, PHONE = {"width": 1180, "height": 800}, {"width": 390, "height": 844}
PROMPT = "Up betimes and to my office,"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Fake]]:
    fake = Fake()
    with serving_fake(fake) as url:
        yield url, fake


@pytest.fixture
def fake(server: tuple[str, Fake]) -> Fake:
    server[1].__init__()  # type: ignore[misc]
    return server[1]


@pytest.fixture
def page(browser: Any, server: tuple[str, Fake], fake: Fake) -> Iterator[Any]:
    """The page in a fresh context; a test fails if anything was an error in its console, such as a blocked resource."""
    context = browser.new_context(viewport=DESKTOP, base_url=server[0])
    page, complaints = context.new_page(), []
    page.set_default_timeout(15_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto("/")
    page.get_by_text("2,048 tokens of context").wait_for()
    yield page
    context.close()
    assert [text for text in complaints if "Failed to load resource" not in text and "net::" not in text] == []


def ask(page: Any, text: str = PROMPT, *, waits: bool = True) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    if waits:
        page.get_by_role("button", name="Send").wait_for()


def choose(page: Any, view: str) -> None:
    page.get_by_role("radio", name=view).check(force=True)


def answer(page: Any, number: int = -1) -> str:
    """The text of an answer as it is shown, without rejected drafts and marks."""
    script = "n => [...n.querySelectorAll('.round')].map(r => [...r.childNodes].filter(c => c.className != 'ghost')"
    return str(page.locator(".text").nth(number).evaluate(f"{script}.map(c => c.textContent).join('')).join('')"))


def spoken(page: Any) -> str:
    return str(page.locator("#spoken").text_content())


def words(text: str, count: int = 160) -> str:
    return "".join((re.findall(r" [^ ]+", text) * 60)[:count])


def test_tokens_are_marked_by_what_became_of_them(page: Any, fake: Fake) -> None:
    ask(page)
    assert answer(page) == words(STORY)
    rounds = [round for event in fake.events("chat", fake.requests[0][1]) for round in event["choices"][0]["rounds"]]
    for kind in ("recovered", "bonus"):
        shown = page.locator(f".text .{kind}").all_inner_texts()
        assert shown == [round["texts"][-1].strip() for round in rounds if round["last"] == kind]
    assert page.locator(".text .accepted").count() == sum(round["accepted"] for round in rounds)
    ghosts = page.locator(".text .ghost > span").all_inner_texts()
    assert ghosts == [r["draft"][r["accepted"]].strip() for r in rounds if r["last"] == "recovered"]
    page.get_by_text("Settings").click()
    page.get_by_label("Rejected drafts").uncheck()
    assert not page.locator(".text .ghost").first.is_visible()
    assert spoken(page) == f"Answer: {words(STORY)}"


def test_the_pointer_and_the_arrow_keys_show_a_round(page: Any, fake: Fake) -> None:
    ask(page)
    first = next(fake.events("chat", fake.requests[0][1]))["choices"][0]["rounds"][0]
    card = page.locator(".card")
    page.locator(".round").first.hover()
    title = f"Round 1: {first['accepted']} of 4 draft tokens accepted"
    assert title in card.inner_text()
    assert card.locator("li").count() == 5
    assert "recovered: the draft differed" in card.inner_text()
    page.locator(".text").focus()
    page.keyboard.press("End")
    assert f"Round {page.locator('.round').count()}:" in card.inner_text()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert title in card.inner_text()
    page.keyboard.press("Tab")
    assert not card.is_visible()


def test_a_tree_shows_the_alternatives_and_a_stop_string_is_cut_off(page: Any) -> None:
    script = """async () => {
      const { RoundsView, verdict } = await import("/rounds.js");
      const tree = { t: 5, texts: [" a", " c", " x"], accepted: 2, last: "recovered",
        draft: [" b", " a", " c", " d", " e"], parents: [-1, -1, 1, 1, 2] };
      const view = new RoundsView("Tree");
      document.querySelector("main").append(view.node);
      view.add(tree);
      view.show(0);
      const ended = { t: 6, texts: [" y", " E", "ND"], accepted: 3, last: "accepted", draft: [" y", " E", "ND", "."] };
      view.add(ended);
      view.finish(" a c x y E");
      return [verdict(tree), verdict(ended).rejected, view.text.textContent, view.card.innerText];
    }"""
    tree, unneeded, text, card = page.evaluate(script)
    assert tree == {"path": [1, 2], "depths": [0, 0, 1, 1, 2], "rejected": [" e"]}
    assert unneeded == []
    assert text == " a c e x y E"
    assert "e rejected" in card
    assert "b rejected" in card


def test_escape_stops_and_the_part_that_came_is_kept(page: Any, fake: Fake) -> None:
    fake.round_s = 0.05
    ask(page, waits=False)
    page.locator(".round").nth(2).wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    assert words(STORY).startswith(answer(page))
    assert "stopped" in page.locator(".facts").inner_text()
    fake.round_s = 0
    ask(page)
    assert fake.requests[-1][1]["messages"][1]["content"] == answer(page, 0) != ""


def test_a_stream_that_is_cut_is_resumed(page: Any, fake: Fake) -> None:
    fake.cut_after = 7
    ask(page)
    assert answer(page) == words(STORY)
    assert [last for _, _, last in fake.requests] == [None, "6"]
    assert fake.requests[0][1] == fake.requests[1][1]
    assert page.locator(".mark").all_inner_texts() == ["resumed"]
    assert page.locator("#notice").inner_text() == ""


def test_a_conversation_has_a_history_which_a_reload_keeps_and_a_new_chat_forgets(page: Any, fake: Fake) -> None:
    ask(page)
    ask(page, "And then?")
    path, body, _ = fake.requests[-1]
    assert path == "/v1/chat/completions"
    assert [message["content"] for message in body["messages"]] == [PROMPT, words(STORY), "And then?"]
    assert body["speculative"] == {"trace": True}
    assert (body["model"], body["seed"], body["temperature"], body["max_tokens"]) == ("paceline", 1, 0.7, 160)
    page.reload()
    page.locator("article").nth(1).wait_for()
    assert answer(page, 0) == words(STORY)
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    fake.round_s = 0.05
    ask(page, "Stopped", waits=False)
    page.locator(".round").nth(2).wait_for()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Send").wait_for()
    ask(page, "Alone", waits=False)
    page.locator(".round").first.wait_for()
    assert [message["content"] for message in fake.requests[-1][1]["messages"]] == ["Alone"]


def test_a_model_without_a_chat_template_continues_the_text(page: Any, fake: Fake) -> None:
    fake.has_template = False
    page.reload()
    page.get_by_role("button", name=PROMPT).click()
    page.get_by_role("button", name="Copy").wait_for()
    ask(page, "So to bed.")
    path, body, _ = fake.requests[-1]
    assert (path, body["prompt"]) == ("/v1/completions", f"{PROMPT}{words(STORY)}\n\nSo to bed.")


@pytest.mark.parametrize("together", [False, True])
def test_equal_texts_are_called_identical_and_the_time_is_compared(page: Any, fake: Fake, together: bool) -> None:
    choose(page, "Compare")
    page.get_by_text("Settings").click()
    page.get_by_label("Compare at the same time").set_checked(together)
    ask(page)
    assert re.fullmatch(r"identical SHA-256 of both texts: [0-9a-f]{16}…", page.locator(".badge").inner_text())
    (_, without, _), (_, drafted, _) = sorted(fake.requests, key=lambda sent: "enabled" not in sent[1]["speculative"])
    assert together or fake.requests[0][1] is without
    assert without.pop("speculative") == {"trace": True, "enabled": False}
    assert drafted.pop("speculative") == {"trace": True}
    assert without.pop("cache_salt") != drafted.pop("cache_salt")
    assert without == drafted
    assert all(float(speed.split()[0]) > 0 for speed in page.locator(".speed").all_inner_texts())
    assert re.match(r"(Drafts saved [\d.]+ m?s of|A draft is not worth it)", page.locator("#saved").inner_text())


def test_different_texts_are_told_apart_by_their_first_difference(page: Any) -> None:
    choose(page, "Compare")
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens").fill(str(len(STORY.split()) + 3))
    ask(page, "differ")
    assert page.locator(".badge").inner_text() == f"different from character {len(STORY) + 2} on"


def test_verdicts_and_savings(page: Any) -> None:
    script = """async () => {
      const { judge, saving } = await import("/rounds.js");
      const text = async (one, other) => (await judge([{ text: one }, { text: other }])).textContent;
      const hashed = await text("a\\u{1F600}b", "a\\u{1F600}c");
      Object.defineProperty(crypto, "subtle", { value: undefined });
      return [hashed, await text("ab", "ab"), await text("ab", "abc"),
        saving([{ ms: 3500 }, { ms: 2310 }]), saving([{ ms: 1000 }, { ms: 999 }]),
        saving([{ ms: 1000 }, { ms: 1100 }])];
    }"""
    assert page.evaluate(script) == [
        "different from character 3 on",
        "identical letter by letter: hashes need HTTPS",
        "different from character 3 on",
        "Drafts saved 1.19 s of 3.50 s (34 %).",
        "A draft is not worth it here: 0 ms longer (0 %).",
        "A draft is not worth it here: 100 ms longer (10 %).",
    ]


def test_a_server_with_keys_is_asked_with_one_that_only_this_tab_keeps(page: Any, fake: Fake) -> None:
    fake.key = "right"
    page.reload()
    page.get_by_role("textbox", name="Key").fill("wrong")
    with page.expect_response(lambda response: response.status == 401):
        page.keyboard.press("Enter")
    page.get_by_role("textbox", name="Key").fill("right")
    page.keyboard.press("Enter")
    page.get_by_text("2,048 tokens of context").wait_for()
    ask(page)
    assert answer(page) == words(STORY)
    assert page.evaluate("localStorage.length") == 0


def test_a_demo_kills_a_process_and_the_stream_goes_on(page: Any, fake: Fake) -> None:
    fake.round_s, fake.pause_s = 0.02, 0.3
    ask(page, waits=False)
    page.locator(".round").nth(2).wait_for()
    page.get_by_role("button", name="Target", exact=True).click()
    page.get_by_role("button", name="Copy").wait_for()
    assert fake.killed == ["target"]
    assert page.locator(".mark").all_inner_texts() == ["Target killed"]
    assert answer(page) == words(STORY)
    notice = page.locator("#notice").inner_text()
    pause = re.fullmatch(r"Target killed. The longest pause since then: (\d+) ms.", notice)
    assert pause
    assert int(pause[1]) >= 100  # rounds take 20 ms; a busy browser gets what comes before the pause late


def test_the_live_figures_are_those_of_the_metrics(page: Any, fake: Fake) -> None:
    page.clock.install()
    page.reload()
    page.get_by_text("Router").first.wait_for()
    fake.rounds, fake.drafted, fake.accepted, fake.tokens = 10, 40, 30, 40
    page.clock.run_for(2000)
    page.get_by_text("2.1 ms").wait_for()
    figures = page.locator("#live").inner_text()
    for text in ("6.1 ms", "1.0 ms", "running\n1", "waiting\n0", "75 %", "\ntokens/s\n"):
        assert text in figures
    for text in ("Router\nready", "Ingress\nready"):
        assert text in figures
    fake.rounds, fake.drafted, fake.accepted = 2, 8, 2  # a new Router
    page.clock.run_for(2000)
    page.get_by_text("25 %").wait_for()
    assert "\ntokens/s, not compiled for 40 s more\n" in page.locator("#live").inner_text()
    page.get_by_text("Live").click()
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.clock.run_for(6000)
    assert seen == [], "nothing is asked for figures that nobody sees"


def test_a_replay_is_one_file_that_opens_without_a_network(page: Any, browser: Any, tmp_path: Path) -> None:
    choose(page, "Compare")
    ask(page, "</script><b>&")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    context = browser.new_context(offline=True)
    replay, asked = context.new_page(), []
    replay.on("request", lambda request: asked.append(request.url))
    replay.on("pageerror", lambda error: asked.append(str(error)))
    replay.goto(path.as_uri())
    replay.get_by_text("160 tokens").nth(1).wait_for()
    assert [answer(replay, number) for number in (0, 1)] == [words(STORY)] * 2
    assert "identical" in replay.locator(".badge").inner_text()
    assert replay.locator(".asked").inner_text() == "</script><b>&"
    replay.get_by_label("Time").fill("0")
    assert answer(replay) == ""
    replay.get_by_role("button", name="Play").click()
    replay.get_by_text("160 tokens").nth(1).wait_for()
    assert asked == [path.as_uri()]
    assert serious(replay) == []
    context.close()


def test_everything_is_reached_with_the_tab_key(page: Any) -> None:
    ask(page)
    page.reload()
    page.get_by_role("button", name="Copy").wait_for()
    name = "({ textContent: t, id, name, className: c }) => id || name || (c === 'text' ? c : t.trim())"
    seen = []
    for _ in range(13):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(f"({name})(document.activeElement)"))
    assert seen == [
        *("Skip to the message", "view", "new", "text", "Copy", "Save replay", "Live"),
        *("Draft", "Target", "Router", "message", "send", "Settings"),
    ]
    assert page.evaluate("getComputedStyle(document.getElementById('send')).outlineStyle") == "none"
    page.locator("#send").focus()
    assert page.evaluate("getComputedStyle(document.getElementById('send')).outlineStyle") == "solid"


def serious(page: Any) -> list[str]:
    violations = axe.Axe().run(page).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in violations if v["impact"] in ("serious", "critical")]


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(page: Any, fake: Fake, size: dict[str, int], scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size(size)
    assert serious(page) == []
    ask(page)
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("Settings").click()
    assert serious(page) == []
    choose(page, "Compare")
    ask(page, "differ")
    page.get_by_text("Live").click()
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"

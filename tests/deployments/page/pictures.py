"""python -m tests.deployments.page.pictures --url URL: the README's pictures of the page, from a server with page=demo.

Without --url it starts the fake server of the tests.
"""

import argparse
import contextlib
import io
import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.deployments.page.fake_server import Fake, serving_fake

IMAGES = Path(__file__).parents[3] / ".github" / "images"
SIZE = {"width": 1080, "height": 720}
PNG_COLORS, GIF_COLORS, GIF_WIDTH = 192, 128, 720
MAX_PNG_BYTES, MAX_GIF_BYTES = 150_000, 600_000
FRAME_S = 0.05
LONGEST_STILL_S = 2.0
"""How long the recording shows the same picture at most."""
PROMPT = "Up betimes and to my office,"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server with page=demo")
    url = parser.parse_args().url
    with contextlib.ExitStack() as stack:
        url = url or stack.enter_context(serving_fake(Fake(round_s=0.03, pause_s=3.0)))
        browser = stack.enter_context(chromium())
        page = browser.new_page(viewport=SIZE, color_scheme="light", base_url=url)
        page.goto("/")
        page.get_by_text("tokens of context").wait_for()
        take_pictures(page)
        record_kill(page)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def take_pictures(page: Any) -> None:
    """A text with a round's draft in light, the comparison in dark, the phone."""
    ask(page, PROMPT)
    page.wait_for_timeout(2500)  # until the figures have been read
    page.locator(".round:has(.ghost)").nth(3).hover()
    save(page, "page.png")
    page.emulate_media(color_scheme="dark")
    page.get_by_role("radio", name="Compare").check(force=True)
    ask(page, PROMPT)
    page.wait_for_timeout(2500)
    save(page, "page-compare.png")
    page.emulate_media(color_scheme="light")
    page.get_by_role("radio", name="Chat").check(force=True)


def record_kill(page: Any) -> None:
    """The target is killed under a stream: a recording, and a picture of the end."""
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens").fill("220")
    page.get_by_label("Rejected drafts").uncheck()
    page.get_by_text("Settings").click()
    page.get_by_label("Message").fill("Call me Ishmael. Some years ago")
    page.keyboard.press("Enter")
    frames: list[tuple[float, bytes]] = []
    is_killed = False
    while not page.get_by_role("button", name="Copy").is_visible():
        frames.append((time.monotonic(), page.screenshot()))
        if not is_killed and page.locator(".round").count() > 12:
            page.get_by_role("button", name="Target", exact=True).click()
            is_killed = True
        page.wait_for_timeout(1000 * FRAME_S)
    frames.append((time.monotonic(), page.screenshot()))
    save(page, "page-killed.png")
    save_gif(frames)


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send").wait_for(timeout=120_000)


def save(page: Any, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(PNG_COLORS).save(IMAGES / name, optimize=True)
    check_size(IMAGES / name, MAX_PNG_BYTES)


def save_gif(frames: list[tuple[float, bytes]]) -> None:
    shots: list[Image.Image] = []
    for _, shot in frames:
        picture = Image.open(io.BytesIO(shot)).convert("RGB")
        height = picture.height * GIF_WIDTH // picture.width
        shots.append(picture.resize((GIF_WIDTH, height), Image.Resampling.LANCZOS))
    palette = shots[-1].quantize(GIF_COLORS, Image.Quantize.MAXCOVERAGE)
    times = [t for t, _ in frames] + [frames[-1][0] + LONGEST_STILL_S]
    lasts = [int(1000 * min(LONGEST_STILL_S, after - t)) for t, after in itertools.pairwise(times)]
    first, *rest = (shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots)
    first.save(
        IMAGES / "page-kill.gif", save_all=True, append_images=rest, duration=lasts, loop=0, optimize=True, disposal=1
    )
    check_size(IMAGES / "page-kill.gif", MAX_GIF_BYTES)


def check_size(path: Path, limit: int) -> None:
    if (size := path.stat().st_size) > limit:
        raise SystemExit(f"{path} has {size:,} bytes, at most {limit:,} are allowed")


if __name__ == "__main__":
    main()

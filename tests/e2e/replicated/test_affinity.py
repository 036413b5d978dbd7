"""A conversation's turns, over either Ingress, go to the Router that holds its blocks."""

import time

import httpx
import pytest

from tests.e2e.replicated.test_operating import agreed, all_know
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

NUM_CHATS, NUM_TURNS = 4, 5
REPORTED_S = 0.5
"""After which every Ingress has heard who holds a prompt."""


def test_every_turn_finds_the_blocks_of_the_last_one(server, url):
    """Each turn comes over a new connection, so to any Ingress."""
    wait_until(lambda: all_know(url, 2))
    before, num_known = agreed(url, "vllm:prefix_cache_hits_total"), 0
    texts = [f"Chat {chat}: {'once upon a time there was. ' * 8}" for chat in range(NUM_CHATS)]
    last = [0] * NUM_CHATS
    for _ in range(NUM_TURNS):
        for chat, text in enumerate(texts):
            body = {"prompt": text, "max_tokens": 8, "ignore_eos": True, "cache_salt": f"chat {chat}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            num_known += last[chat] // 16 * 16
            last[chat] = answer["usage"]["prompt_tokens"]
            texts[chat] = f"{text}{answer['choices'][0]['text']} And what came then? "
        time.sleep(REPORTED_S)
    assert agreed(url, "vllm:prefix_cache_hits_total") - before >= 0.9 * num_known > 0

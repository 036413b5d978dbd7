"""Clients with different `cache_salt`s or API keys learn nothing of each other's prompts, over HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from engine.drafting.copying.suffix import SuffixDrafter
from engine.protocols import Verdict, Verifier, VerifyRow
from tests.deployments.serving import serving

TEXT = "The same long words, sent by everybody who is here. " * 4


class CountingVerifier:
    """Passes rounds on, and counts the tokens that they compute."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.num_computed = 0

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        self.num_computed += sum(row.length for row in rows)
        return await self._verifier.verify(rows)

    def release(self, request_id: str) -> None:
        self._verifier.release(request_id)


KEYS = ("anna", "bert")
DRAFTED = {"num_speculative_tokens": 4, "fixed": True}
SECRET = "the number of the safe is 4711"


def ask(url: str, key: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def drafted(url: str, key: str, **body: Any) -> str:
    """What is drafted for a request whose prompt ends as a part of the secret."""
    body = {"prompt": SECRET[:-4], "max_tokens": 4, "logit_bias": {str(ord("4") - ord("!")): 100}} | body
    body["speculative"] = DRAFTED | {"trace": True}
    return "".join(text for each in ask(url, key, **body)["choices"][0]["rounds"] for text in each["draft"])


@pytest.mark.parametrize(
    ("keys", "shares", "salts", "sees"),
    [
        (("anna", "bert"), False, (None, None), False),
        (("anna", "bert"), False, ("s", "s"), False),
        (("anna", "anna"), False, (None, None), True),
        (("anna", "anna"), False, ("s", "s"), True),
        (("anna", "anna"), False, ("s", None), False),
        (("anna", "bert"), True, (None, None), True),
        (("anna", "bert"), True, ("s", None), False),
    ],
)
def test_a_key_sees_and_infers_nothing_of_anothers_texts(
    config: AppConfig,
    model_dir: Path,
    keys: tuple[str, str],
    shares: bool,
    salts: tuple[str | None, str | None],
    sees: bool,
) -> None:
    """Neither in drafts nor in counts, nor by what is computed of a prompt, or compiled of a grammar."""
    config = config.model_copy(update={"share_between_keys": shares})
    first, second = ({} if salt is None else {"cache_salt": salt} for salt in salts)
    with serving(config, model_dir, keys=KEYS, drafter=SuffixDrafter()) as (url, rig):
        grammar = {"structured_outputs": {"choice": [SECRET]}, "max_tokens": 40}
        (choice,) = ask(url, keys[0], prompt=TEXT, speculative=DRAFTED, **grammar, **first)["choices"]
        assert choice["text"] == SECRET
        num_compiled = len(rig.grammars._compiled)
        verifier = rig.engine.verifier = CountingVerifier(rig.engine.verifier)
        usage = ask(url, keys[1], prompt=TEXT, max_tokens=1, **second)["usage"]
        num_prompt_tokens, num_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        in_full_blocks = (num_prompt_tokens - 1) // 16 * 16
        assert num_cached == (in_full_blocks if sees else 0)
        assert verifier.num_computed == num_prompt_tokens - num_cached
        assert ("71" in drafted(url, keys[1], **second)) == sees
        ask(url, keys[1], prompt="a", **grammar, **second)
        assert (len(rig.grammars._compiled) == num_compiled) == sees

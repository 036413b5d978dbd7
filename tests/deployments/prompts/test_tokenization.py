"""/tokenize and /detokenize through HTTP."""

import httpx
import pytest

from tests.deployments.fakes import MAX_MODEL_LEN, VOCAB_SIZE


async def test_text_becomes_tokens_and_back(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": "a</s>", "return_token_strs": True})).json()
    assert (tokens["count"], tokens["max_model_len"]) == (5, 512)
    assert "".join(tokens["token_strs"]) == "a</s>"
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "a</s>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, "tokens"),
    ],
)
async def test_what_has_no_tokens_or_no_text_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)

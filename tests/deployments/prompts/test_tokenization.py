"""/tokenize and /detokenize through HTTP."""

import httpx


async def test_text_becomes_tokens_and_back(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": "a</s>", "return_token_strs": True})).json()
    assert (tokens["count"], tokens["max_model_len"]) == (5, 512)
    assert "".join(tokens["token_strs"]) == "a</s>"
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "a</s>"}

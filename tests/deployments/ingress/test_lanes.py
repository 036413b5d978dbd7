import threading
from typing import Any

from transformers import PreTrainedTokenizerFast

from deployments.ingress.lanes import Lanes


async def test_each_lane_has_a_thread_and_a_tokenizer_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    lanes = Lanes(tokenizer)

    def look(tokenizer: Any, text: str) -> tuple[int, int, list[int]]:
        return threading.get_ident(), id(tokenizer.backend_tokenizer), tokenizer(text)["input_ids"]

    short, again, long = [await lanes.run(look, "a</s>", is_long=is_long) for is_long in (False, False, True)]
    assert short == again
    assert short[:1] != long[:1]
    assert short[2] == long[2]
    assert {short[0], long[0]}.isdisjoint({threading.get_ident()})


async def test_the_lanes_do_not_share_the_flag_that_splits_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    lanes = Lanes(tokenizer)

    def encode(tokenizer: Any, *, splits: bool) -> int:
        return len(tokenizer("</s>", split_special_tokens=splits)["input_ids"])

    def flag(tokenizer: Any) -> bool:
        return bool(tokenizer.backend_tokenizer.encode_special_tokens)

    await lanes.run(lambda tokenizer: encode(tokenizer, splits=True), is_long=True)
    await lanes.run(lambda tokenizer: encode(tokenizer, splits=False), is_long=False)
    assert await lanes.run(flag, is_long=True)
    assert not await lanes.run(flag, is_long=False)

"""Lanes: two threads with a tokenizer each, so that short texts never wait behind long ones.

The tokenizer lets other threads run while it works on a text, but nothing can stop it. So a long text is tokenized in
pieces (`pieces.py`), each a job of its own: long texts take turns, and the text of a client that has left gets no more
of them.
"""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Lanes:
    """Owns two copies of a tokenizer: whether it splits special tokens is a flag that threads would share."""

    def __init__(self, tokenizer: Any) -> None:
        self._lanes = [(tokenizer, _thread("short texts")), (copy.deepcopy(tokenizer), _thread("long texts"))]

    async def run(self, function: Callable[..., T], *args: Any, is_long: bool) -> T:
        """Call a function with a tokenizer and further arguments, on the tokenizer's thread."""
        tokenizer, thread = self._lanes[is_long]
        return await asyncio.get_running_loop().run_in_executor(thread, function, tokenizer, *args)


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, name)

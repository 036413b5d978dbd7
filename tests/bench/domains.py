"""Prompts by domain, as token ids: prose of proposals, a novel, code, chat, and text to be copied."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine.training.corpus import read_corpus
from tests.bench.workload import OWN_PROMPTS

SHARED = Path(__file__).parents[3] / "shared" / "data"
NUM_PROMPTS = 8
PROMPT_TOKENS = 160


def read_domains(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Return `NUM_PROMPTS` prompts of each domain; without the shared data, one domain of a few texts."""
    if not SHARED.is_dir():
        return {"own": _encoded(list(OWN_PROMPTS), tokenizer)}
    peps, novel = _passages("peps"), _passages("moby-dick")
    code = [record["prompt"] for record in _records("humaneval")]
    domains = {
        "proposals": _encoded(peps, tokenizer),
        "novel": _encoded(novel, tokenizer),
        "code": _encoded(code, tokenizer),
        "repeat": [_copied(ids) for ids in _encoded(code, tokenizer)],
    }
    if tokenizer.chat_template:
        chat = [_as_chat(record["turns"][0], tokenizer) for record in _records("mt_bench")]
        domains["chat"] = _encoded(chat, tokenizer)
    return domains


def _copied(ids: list[int]) -> list[int]:
    """Return a prompt whose text is to be written a third time: twice in full, then its beginning."""
    return [*ids, *ids, *ids[:16]]


def _passages(name: str) -> list[str]:
    """Return passages of a text that the bundled pair was not trained on."""
    return [piece.text for piece in read_corpus([SHARED / "corpus" / f"{name}.txt.gz"]).held_out]


def _records(name: str) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in (SHARED / "prompts" / f"{name}.jsonl").read_text().splitlines()]


def _as_chat(question: str, tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    step = max(1, len(texts) // NUM_PROMPTS)
    return [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts[::step][:NUM_PROMPTS]]

"""Prompts by domain, as token ids: prose of proposals, a novel, code, chat, and requests that were answered before."""

from transformers import PreTrainedTokenizerBase

from engine.training.corpus import read_corpus
from tests.bench.workload import OWN_PROMPTS, SHARED, records

_CHANGED_PLACE = 20
NUM_PROMPTS = 8
PROMPT_TOKENS = 160
REPEAT = "repeat"
"""Prompts of code that were answered before, and come again `changed`: most of the answer is to be written again."""


def read_domains(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Return `NUM_PROMPTS` prompts of each domain; without the shared data, one domain of a few texts."""
    if not SHARED.is_dir():
        return {"own": _encoded(list(OWN_PROMPTS), tokenizer)}
    peps, novel = _passages("peps"), _passages("moby-dick")
    code = [record["prompt"] for record in records("humaneval")]
    domains = {
        "proposals": _encoded(peps, tokenizer),
        "novel": _encoded(novel, tokenizer),
        "code": _encoded(code, tokenizer),
        REPEAT: _encoded(code, tokenizer),
    }
    if tokenizer.chat_template:
        chat = [_as_chat(record["turns"][0], tokenizer) for record in records("mt_bench")]
        domains["chat"] = _encoded(chat, tokenizer)
    return domains


def changed(ids: list[int], nth: int) -> list[int]:
    """Return a prompt with another token near its beginning, each time somewhere else."""
    place = min(len(ids) - 1, _CHANGED_PLACE + nth)
    return [*ids[:place], ids[place] ^ 1, *ids[place + 1 :]]


def _passages(name: str) -> list[str]:
    """Return passages of a text that the bundled pair was not trained on."""
    return [piece.text for piece in read_corpus([SHARED / "corpus" / f"{name}.txt.gz"]).held_out]


def _as_chat(question: str, tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _encoded(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    step = max(1, len(texts) // NUM_PROMPTS)
    return [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts[::step][:NUM_PROMPTS]]

"""Trains a byte-level BPE tokenizer with end-of-text, user and assistant tokens and a chat template."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.training.errors import TrainingError

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"

# A system message becomes prose before the conversation, because the corpus has no system messages. It has no tools
# either: they are here in the form of Hermes, so that clients which call tools can be tried.
CHAT_TEMPLATE = (
    "{% if tools %}These functions can be called:\n"
    "{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
    "A call is written as\n"
    '<tool_call>\n{"name": "the function", "arguments": {"its": "arguments"}}\n</tool_call>\n\n{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>"
    "{% endfor %}<|endoftext|>"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'tool' %}<|user|><tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts; every byte is a token, so any input can be encoded and decoded."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END_OF_TEXT, USER, ASSISTANT]
    if vocab_size < len(alphabet) + len(special):
        raise TrainingError(f"the vocabulary has {vocab_size} tokens; it needs at least {len(alphabet) + len(special)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

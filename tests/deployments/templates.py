"""Chat templates, without tools, of two forms in which models call tools, and with thoughts; a tokenizer with one."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.fakes import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('assistant first') }}"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}<|start|>assistant\n"
)
HERMES = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer in <tool_call></tool_call><|end|>\n{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>\n{% endfor %}<|start|>assistant\n"
)
THINKING = HERMES + "{# <think></think> #}"
LLAMA = HERMES.replace("<tool_call>", "").replace("</tool_call>", "").replace('"arguments"', '"parameters"')


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="</s>", additional_special_tokens=["<|start|>", "<|end|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(template: str | None, path: Path) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of(template)
    tokenizer.save_pretrained(path)
    return tokenizer

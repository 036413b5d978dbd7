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


THOUGHTS = {
    "think": "{{ '<think>' ~ m.reasoning_content ~ '</think>\n\n' if m.reasoning_content }}",
    "[THINK]": "{{ '[THINK]' ~ m.reasoning_content ~ '[/THINK]' if m.reasoning_content }}",
    "gemma4": "{{ '<|channel>thought\n' ~ m.reasoning_content ~ '\n<channel|>' if m.reasoning_content }}",
    "gpt-oss": "{{ '<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|><|start|>assistant' if m.thinking }}",
    "": "",
}
_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}%s{% endfor %}"
_ARGUMENTS = "{% for k, v in f.arguments | items %}%s{% endfor %}"
_JSON = '{"name": "{{ f.name }}", "%s": {{ f.arguments | tojson }}}'
_LIST = '[{% for c in m.tool_calls %}{% set f = c.function %}%s{{ ", " if not loop.last }}{% endfor %}]'


_WIDE = "\N{FULLWIDTH VERTICAL LINE}"


def _each(call: str, entry: str = "") -> str:
    return _EACH.replace("%s", call.replace("%s", _ARGUMENTS.replace("%s", entry)))


CALLS = {
    "": "",
    "hermes": _each("\n<tool_call>\n" + _JSON.replace("%s", "arguments") + "\n</tool_call>"),
    "llama3": _each(_JSON.replace("%s", "parameters")),
    "qwen3-coder": _each(
        "<tool_call>\n<function={{ f.name }}>\n%s</function>\n</tool_call>\n",
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n",
    ),
    "glm-4.5": _each(
        "\n<tool_call>{{ f.name }}\n%s</tool_call>", "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    ),
    "minimax": "{{ '\n<minimax:tool_call>\n' if m.tool_calls }}"
    + _each('<invoke name="{{ f.name }}">\n%s</invoke>\n', '<parameter name="{{ k }}">{{ v }}</parameter>\n')
    + "{{ '</minimax:tool_call>' if m.tool_calls }}",
    "deepseek-v3.2": f"{{% set d = '{_WIDE}DSML{_WIDE}' %}}"
    "{{ '\n\n<' + d + 'function_calls>\n' if m.tool_calls }}"
    + _each(
        "{{ '<' + d + 'invoke name=\"' + f.name + '\">\n' }}%s{{ '</' + d + 'invoke>\n' }}",
        "{{ '<' + d + 'parameter name=\"' + k + '\" string=\"' + ('true' if v is string else 'false') + '\">' }}{{ v }}"
        "{{ '</' + d + 'parameter>\n' }}",
    )
    + "{{ '</' + d + 'function_calls>' if m.tool_calls }}",
    "gemma4": _each(
        "<|tool_call>call:{{ f.name ~ '{' }}%s}<tool_call|>",
        "{{ ',' if not loop.first }}{{ k }}:{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}",
    ),
    "gpt-oss": _each(
        "{{ ' to=functions.' + f.name + '<|channel|>commentary ' + 'json<|message|>' }}"
        "{{ f.arguments | tojson }}<|call|>"
    ),
    "deepseek-v3": "{{ '<|tool▁calls▁begin|>' if m.tool_calls }}".replace("|", _WIDE)
    + _each(
        "{{ '<|tool▁call▁begin|>' + c.type + '<|tool▁sep|>' + f.name + '\n```json\n' + f.arguments + '\n```' }}"
        "<|tool▁call▁end|>".replace("|", _WIDE)
    ),
    "deepseek-v3.1": "{{ '<|tool▁calls▁begin|>' if m.tool_calls }}".replace("|", _WIDE)
    + _each(
        "{{ '<|tool▁call▁begin|>' + f.name + '<|tool▁sep|>' + f.arguments + '<|tool▁call▁end|>' }}".replace("|", _WIDE)
    ),
    "kimi": "{{ '<|tool_calls_section_begin|>' if m.tool_calls }}"
    + _each("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>")
    + "{{ '<|tool_calls_section_end|>' if m.tool_calls }}",
    "mistral": _each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "mistral-v3": "{% if m.tool_calls %}[TOOL_CALLS]"
    + _LIST.replace(
        "%s",
        "{{ raise_exception('ids have nine letters') if c.id | length != 9 }}"
        '{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}',
    )
    + "{% endif %}",
    "nemotron": "{% if m.tool_calls %}<TOOLCALL>" + _LIST.replace("%s", "{{ f | tojson }}") + "</TOOLCALL>{% endif %}",
}
"""How the chat templates of families write the calls of an earlier answer `m`."""


CONTENT = {
    "llama3": "{{ m.content if not m.tool_calls }}",
    "gpt-oss": "{{ '<|channel|>final<|message|>' ~ m.content ~ '<|return|>' if m.content and not m.tool_calls }}"
    "{{ '<|channel|>analysis<|message|>' ~ m.content ~ '<|end|><|start|>assistant' if m.content and m.tool_calls }}",
}


def family(prompt: str, thoughts: str, calls: str) -> str:
    """A chat template that writes answers as a family's does, after the end of a prompt."""
    begun = (
        "{{ m.reasoning_content or '' }}\n</think>\n\n" if prompt.rstrip().endswith("<think>") else THOUGHTS[thoughts]
    )
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}"
        + prompt
        + begun
        + CONTENT.get(calls, "{{ m.content }}")
        + CALLS[calls]
        + "{% else %}"
        "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )


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

"""Which token ids and parameters is a request?

- `parameters`: fields to sampling parameters; limits that depend on the model; truncated prompts.
- `encoder`: text to token ids and back, on threads.
- `conversation`: messages and tools to text, by the chat template.
- `template_input`: what the chat template reads, found by trying; no text of a message is left out.
- `message_forms`: how a model writes thoughts and tool calls (`message_forms.json`).
- `tokenization`: the fields of /tokenize and /detokenize.
- `grammar_compiler`: makes and tries clients' grammars, in the process `grammar_process`.
"""

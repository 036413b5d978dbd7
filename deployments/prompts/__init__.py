"""Which token ids and parameters is a request?

- `reader`: a request of any API, read whole by what the other files do.
- `parameters`: fields to sampling parameters; limits that depend on the model; truncated prompts.
- `encoder`, `tokenization`: text to token ids and back, on threads; the fields of /tokenize and /detokenize.
- `conversation`, `template_input`: messages and tools to text, by the chat template and what it reads.
- `message_forms`: how a model writes thoughts and tool calls (`message_forms.json`).
- `grammar_compiler`, `grammar_process`: makes and tries clients' grammars, in a process.
"""

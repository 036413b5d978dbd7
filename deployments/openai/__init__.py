"""What does a request ask for, and what does its response look like?

A new field of a request goes into the file of its API, or into `sampling_fields` if all have it.

- `completions`: /v1/completions: the request, the response, its writer.
- `chat`: /v1/chat/completions: the same.
- `responses_request`, `responses_writer`: /v1/responses: a chat completion with other names.
- `types`: the base classes of requests and responses, and the types of fields.
- `sampling_fields`: the request fields that APIs share.
- `conversation_fields`: messages, and how they become a prompt.
- `structured_output`: `response_format` and `structured_outputs`.
- `tools`: functions to call, and the grammars of required calls.
- `message_parts`: content, thoughts and tool calls in a growing text.
- `writer`: rounds to a body or events; token counts.
- `logprobs`: log probabilities in responses.
"""

"""What does a request ask for, and what does its response look like?

- `types`: the base classes of requests and responses, and the types of fields.
- `sampling_fields`, `conversation_fields`, `structured_output`, `tools`: request fields that APIs share.
- `completions`, `chat`: an API each: the request, the response, its writer.
- `responses_request`, `responses_writer`: /v1/responses, a chat completion with other names.
- `writer`, `logprobs`, `message_parts`: rounds to a body or events; content, thoughts and calls in a growing text.
"""

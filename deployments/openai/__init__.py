"""OpenAI's APIs: one file for each, and what they share.

The APIs are `completions`, `chat` and `responses`. Their requests share `fields` (base classes), `sampling_fields`,
`structured_output`, `tools` and `messages`; their responses share `writer` (rounds to a body or events), `choices` (the
text so far), `logprobs` and `tool_calls`.
"""

"""OpenAI's APIs: one file or folder for each, and what they share.

The APIs are `completions`, `chat` and `responses/`. Their requests share `fields` (base classes), `sampling_fields`,
`structured_output`, `tools`, `messages` and `chat_template` (how a conversation becomes a prompt); their responses
share `writer` (rounds to a body or events), `choices` (the text so far), `logprobs` and `tool_calls`.
"""

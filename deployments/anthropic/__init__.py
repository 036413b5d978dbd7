"""What does a request in Anthropic's form ask for, and what does its response look like?

A request becomes a chat completion request (`deployments/openai/chat.py`), and its text is that of the chat completion.

- `message_blocks`: messages and their blocks, and the chat messages they become.
- `messages_request`: /v1/messages and /v1/messages/count_tokens: their requests.
- `messages_writer`: the response, its events, the form of errors.
"""

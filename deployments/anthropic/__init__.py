"""What does a request in Anthropic's form ask for, and what does its response look like?

A request (`messages_request`, `message_blocks`) becomes a chat completion request (`deployments/openai/chat.py`);
`messages_writer` sends the chat completion's text.
"""

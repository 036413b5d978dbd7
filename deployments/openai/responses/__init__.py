"""/v1/responses, OpenAI's newer form of a conversation: a chat completion with other names.

`items` are the parts of a conversation that clients send, `request` is the whole request, `body` the response and its
events, and `writer` turns rounds into them.
"""

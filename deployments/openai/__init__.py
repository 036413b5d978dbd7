"""OpenAI's APIs: one file for each, and what they share.

fields, sampling_fields, structured_output, tools, tool_calls, messages (requests); choices, writer, logprobs
(responses); completions, chat, responses (the APIs).
"""

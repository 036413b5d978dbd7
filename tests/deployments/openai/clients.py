"""What programs send besides what changes the prompt: path, plain body, and fields added or in their place."""

from typing import Any

USER: Any = [{"role": "user", "content": "hello"}]
CLIENTS: dict[str, tuple[str, Any, Any]] = {
    "GuideLLM": (
        "/v1/completions",
        {"prompt": "abc", "max_tokens": 6, "ignore_eos": True},
        {"max_completion_tokens": 6, "stop": None},
    ),
    "vllm bench serve": (
        "/v1/completions",
        {"prompt": "abc", "max_tokens": 6},
        {"repetition_penalty": 1.0, "logprobs": None, "best_of": 1, "use_beam_search": False, "length_penalty": 1},
    ),
    "an older vLLM": (
        "/v1/chat/completions",
        {"messages": USER},
        {"use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "early_stopping": False, "echo": False}
        | {"top_logprobs": 0, "reasoning_effort": "none", "include_reasoning": True, "function_call": "none"},
    ),
    "LiteLLM": (
        "/v1/chat/completions",
        {"messages": [*USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, *USER]},
        {
            "user": {"id": 5},
            "messages": [
                *USER,
                {"role": "assistant", "content": "a", "reasoning": "b", "id": "x", "thinking_blocks": [], "usage": {}}
                | {"provider_specific_fields": {"refusal": None}, "refusal": None, "annotations": [], "audio": None},
                {**USER[0], "metadata": {"_db_id": 1}, "timestamp": 5},
            ],
        },
    ),
    "Cline": (
        "/v1/chat/completions",
        {"messages": [*USER, {"role": "assistant", "content": "a"}, *USER]},
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": "a", "reasoning_details": [{"type": "reasoning.text", "index": 0}]},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}],
                },
            ]
        },
    ),
    "LangChain": (
        "/v1/chat/completions",
        {"messages": USER},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "id": "x", "index": 0}]}]},
    ),
    "Claude Code": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 6},
        {
            "metadata": {"user_id": "x", "session": {"id": 1}},
            "speed": "standard",
            "inference_geo": "us",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "citations": []}]}],
        },
    ),
}

"""OpenAI's own client: a streamed answer, and an edit whose text is mostly predicted.

`make serve`, then `python -m tests.examples.openai_client http://127.0.0.1:8000/v1`.
"""

import sys

import openai


def main(base_url: str) -> tuple[str, openai.types.CompletionUsage]:
    """Return an answer, and the token counts of the same answer when it is predicted but for one word."""
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    question = {"model": model, "messages": [{"role": "user", "content": "How was the day?"}], "seed": 1}
    answer = ""
    for chunk in client.chat.completions.create(**question, max_tokens=64, stream=True):
        answer += chunk.choices[0].delta.content or ""
    words = answer.split(" ")
    words[len(words) // 2] = "nothing"
    again = client.chat.completions.create(
        **question, max_tokens=64, prediction={"type": "content", "content": " ".join(words)}
    )
    assert again.choices[0].message.content == answer, "a prediction never changes the text"
    return answer, again.usage


if __name__ == "__main__":
    text, usage = main(sys.argv[1])
    sys.stdout.write(f"{text}\n{usage.completion_tokens_details}\n")

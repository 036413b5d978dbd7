from deployments.openai.choices import PromptTokensDetails, Usage
from deployments.openai.responses.body import ResponseUsage


def test_token_counts_have_newer_names() -> None:
    details = PromptTokensDetails(cached_tokens=3)
    old = Usage(prompt_tokens=4, completion_tokens=2, total_tokens=6, prompt_tokens_details=details)
    new = ResponseUsage.of(old)
    assert (new.input_tokens, new.input_tokens_details.cached_tokens) == (4, 3)
    assert (new.output_tokens, new.output_tokens_details.reasoning_tokens, new.total_tokens) == (2, 0, 6)

"""The example of OpenAI's client, against a real server."""

import pytest

from tests.examples.openai_client import main

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def test_a_predicted_answer_is_the_same_and_mostly_accepted(server):
    answer, usage = main(f"{server.url}/v1")
    details = usage.completion_tokens_details
    assert answer
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 2 * details.accepted_prediction_tokens > usage.completion_tokens
    assert details.rejected_prediction_tokens is not None

"""What an encoder-decoder cannot serve."""

from dataclasses import replace

import torch

from engine.models.registry import refused_fields
from tests.fakes import MarkovModel


def test_only_a_model_whose_text_begins_anew_refuses_fields_of_requests():
    info = MarkovModel(torch.eye(3)).info
    assert not refused_fields(info)
    assert {"echo", "prompt_logprobs"} <= refused_fields(replace(info, start_id=0)).keys()

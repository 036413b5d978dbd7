from dataclasses import replace

import pytest

from deployments.router.generation import Generation, choice_index, target_id
from engine.config import ModelConfig
from engine.sampling.params import MAX_SEED, SamplingParams


def seeds(seed: int | None, n: int, num_prompts: int = 1) -> list[int | None]:
    request = Generation("id", [[1]] * num_prompts, SamplingParams(n=n, seed=seed), 1.0)
    return [sequence.params.seed for sequence in request.sequences()]


def test_choices_are_numbered_prompt_by_prompt() -> None:
    request = Generation("cmpl-a-b", [[1], [2]], SamplingParams(n=2), 1.0)
    sequences = request.sequences()
    assert [choice_index(sequence.request_id) for sequence in sequences] == [0, 1, 2, 3]
    assert [sequence.prompt_token_ids for sequence in sequences] == [[1], [1], [2], [2]]
    assert all(sequence.params.n == 1 for sequence in sequences)


def test_every_prompt_of_a_batch_gets_the_seeds_it_would_get_alone() -> None:
    assert seeds(5, n=2, num_prompts=2) == [5, 6, 5, 6]


def test_a_request_without_a_seed_gets_one_per_sequence() -> None:
    drawn = seeds(None, n=4)
    assert len(set(drawn)) == 4
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in drawn)


def test_a_request_that_is_sent_again_draws_with_the_same_seeds() -> None:
    request = Generation("id", [[1], [1]], SamplingParams(n=2), 1.0)
    again = replace(request, request_id="again", output_token_ids={0: [5], 2: [7, 8]}, finished=frozenset([0, 1]))
    first, second = request.sequences(), again.sequences()
    assert [sequence.params for sequence in second] == [sequence.params for sequence in first[2:]]
    assert [(sequence.request_id, sequence.output_token_ids) for sequence in second] == [
        ("again-2", [7, 8]),
        ("again-3", []),
    ]


def test_targets_are_told_apart_by_path_revision_and_quantisation() -> None:
    targets = [ModelConfig("/a"), ModelConfig("/b"), ModelConfig("/a", "v1"), ModelConfig("/a", "v2")]
    targets += [ModelConfig("/a", quantization="int8"), ModelConfig("/a", "v1", quantization="int4")]
    assert len(set(map(target_id, targets))) == 6
    assert target_id(ModelConfig("/a", dtype="float32")) == target_id(ModelConfig("/a"))


@pytest.mark.parametrize("seed", [MAX_SEED, MAX_SEED - 1, -(2**63)])
def test_seeds_stay_in_range(seed: int) -> None:
    assert all(drawn is not None and -(2**63) <= drawn <= MAX_SEED for drawn in seeds(seed, n=3))

"""RequestReader: requests of all APIs become what the engine takes, and errors name the fields that the client sent."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from deployments.anthropic.messages_request import MessagesRequest
from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.openai.responses_request import ResponsesRequest
from deployments.prompts.encoder import PromptEncoder
from deployments.prompts.grammar_compiler import GrammarCompiler
from deployments.prompts.reader import RequestReader
from deployments.wire import ModelLimits
from engine.errors import RequestError
from engine.sampling.grammar import Grammars
from tests.deployments.fakes import MAX_MODEL_LEN, VOCAB_SIZE

USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {"type": "no such type"}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.fixture
def reader(tokenizer: PreTrainedTokenizerFast, grammars: Grammars) -> RequestReader:
    limits = ModelLimits(VOCAB_SIZE, MAX_MODEL_LEN, 4)
    return RequestReader(PromptEncoder(tokenizer), GrammarCompiler(grammars), limits, {"law": "law"}, max_n=8)


async def test_all_apis_read_the_same_conversation(reader: RequestReader) -> None:
    requests = [
        ChatCompletionRequest(messages=USER, max_tokens=9, temperature=0.5),
        ResponsesRequest(input=USER, max_output_tokens=9, temperature=0.5),
        MessagesRequest(messages=USER, max_tokens=9, temperature=0.5),
    ]
    first, *others = [await reader.read(request, None) for request in requests]
    assert all((read.prompts, read.params) == (first.prompts, first.params) for read in others)


async def test_prompts_echoes_predictions_and_adapters(reader: RequestReader) -> None:
    asked: Any = {"prompt": ["ab", "c"], "echo": True, "model": "law"}
    read = await reader.read(CompletionRequest(**asked), None)
    assert (len(read.prompts), read.echoes, read.params.adapter) == (2, ["ab", "c"], "law")
    predicted = CompletionRequest(prompt=[1, 2], prediction={"type": "content", "content": "ab"})  # type: ignore[arg-type]
    read = await reader.read(predicted, None)
    assert (read.prompts, len(read.predicted_token_ids), read.params.adapter) == ([[1, 2]], 2, None)


@pytest.mark.parametrize(
    ("request_class", "fields", "field"),
    [
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        (ResponsesRequest, {"input": "a", "text": {"format": FORMAT}}, "text.format.schema"),
        (ResponsesRequest, {"input": "a" * 10**6}, "input"),
        (MessagesRequest, {"messages": USER, "max_tokens": 10**4}, "max_tokens"),
    ],
)
async def test_errors_name_the_clients_fields(
    reader: RequestReader, request_class: Any, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        await reader.read(request_class.model_validate(fields), None)
    assert refused.value.param == field
    assert field in str(refused.value)


async def test_a_grammar_is_compiled_for_each_salt(reader: RequestReader, tmp_path: Path) -> None:
    asked = CompletionRequest(prompt="a", structured_outputs={"choice": ["x"]})  # type: ignore[arg-type]
    plain, salted = [(await reader.read(asked, salt)).params.grammar for salt in (None, "s")]
    assert plain
    assert salted
    assert plain != salted

"""ResponsesRequest: the body of a request, and the chat completion that answers it."""

import re
from typing import Annotated, Literal

from pydantic import Field

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.chat_template import ReasoningEffort
from deployments.openai.fields import WHOLE, JsonObject, Name, OnlyFalse, RequestModel, Text, refused
from deployments.openai.messages import ChatMessage, message_of
from deployments.openai.responses.items import FunctionChoice, FunctionTool, Item, conversation
from deployments.openai.sampling_fields import EventOptions, SamplingRequest
from deployments.openai.structured_output import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from deployments.openai.tools import ChosenFunction, ToolChoice
from engine.errors import RequestError

CHAT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""The fields of a chat completion request that have another name here."""
LOGPROBS = "message.output_text.logprobs"
_NOTHING_IS_STORED = "nothing is stored here; send the whole conversation as input"


class NamedSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    name: Name
    """Not shown to the model."""
    schema_: JsonObject = Field(alias="schema")
    """The schema."""
    description: Text | None = None
    """Accepted and ignored: the model sees the conversation only."""
    strict: bool | None = None
    """Accepted and ignored: the answer always matches."""


class TextOptions(RequestModel):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None
    """Any text, a JSON object, or JSON that a schema accepts."""
    verbosity: Text | None = None
    """Accepted and ignored: no model here is trained for it."""


class Reasoning(RequestModel):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None
    """A variable for the chat template."""
    summary: Text | None = None
    """Accepted and ignored: thoughts are part of the text."""
    generate_summary: Text | None = None
    """Accepted and ignored: thoughts are part of the text."""


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(SamplingRequest):
    """The body of /v1/responses. Nothing is stored, so a conversation is sent whole each time."""

    input: Text | Annotated[list[Item], Field(min_length=1)]
    """What the user says, or the conversation."""
    instructions: Text | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most; without it, all the room that is left."""
    text: TextOptions | None = None
    """The form of the answer."""
    reasoning: Reasoning | None = None
    """How much the model thinks."""
    truncation: Literal["disabled"] | None = None
    """Input that does not fit is refused, never cut."""
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    """Whether it must: auto (the default) leaves it to the model; a required call follows its schema."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be required at once (the default)."""
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Accepted and ignored: it counts calls of tools that a server runs, and this one runs none."""
    include: list[Includable] | None = None
    """What else to send: log probabilities of the text, if it has no tools. The rest belongs to tools and thoughts that
    are not here, and changes nothing."""
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    """Alternatives to list for each token; only with log probabilities included."""
    stream_options: EventOptions | None = None
    """How events are sent."""
    metadata: dict[Text, Text] | None = None
    """Sent back with the answer."""
    background: OnlyFalse | None = None
    """The answer comes on this connection."""
    previous_response_id: Annotated[None, refused(_NOTHING_IS_STORED)] = None
    """Refused: nothing is stored."""
    conversation: Annotated[None, refused(_NOTHING_IS_STORED)] = None
    """Refused: nothing is stored."""
    prompt: Annotated[None, refused("no prompts are stored here; send it as instructions and input")] = None
    """Refused: no prompts are stored."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the client wants log probabilities."""
        return LOGPROBS in (self.include or [])

    def to_chat(self) -> ChatCompletionRequest:
        """Return the chat completion request that gives the same text.

        Raises:
            RequestError: log probabilities of an answer that may hold calls.
        """
        if self.has_logprobs and self.tools:
            raise RequestError(f"{LOGPROBS} is not available with tools", "include")
        messages: list[ChatMessage] = []
        if self.instructions is not None:
            messages.append(message_of("system", self.instructions))
        messages += [message_of("user", self.input)] if isinstance(self.input, str) else conversation(self.input)
        return ChatCompletionRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self._response_format(),
            tools=[tool.to_chat() for tool in self.tools or []] or None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs if self.has_logprobs else None,
            **{name: getattr(self, name) for name in SamplingRequest.model_fields},
        )

    def _tool_choice(self) -> Literal["none", "auto", "required"] | ToolChoice | None:
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return ToolChoice(type="function", function=ChosenFunction(name=choice.name))
        # Clients send OpenAI's default also where there are no tools to choose from.
        return None if choice in ("auto", "none") and not self.tools else choice

    def _response_format(self) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
        text_format = self.text.format if self.text else None
        if not isinstance(text_format, NamedSchemaFormat):
            return text_format
        schema = JsonSchema(name=text_format.name, schema=text_format.schema_)
        return JsonSchemaFormat(type="json_schema", json_schema=schema)


def with_responses_names(error: RequestError) -> RequestError:
    """Return an error about a chat completion request with the names that its fields have in a responses request."""
    message = str(error)
    for chat_name, name in CHAT_FIELDS.items():
        message = re.sub(rf"\b{re.escape(chat_name)}\b", name, message)
    return type(error)(message, CHAT_FIELDS.get(error.param or "", error.param))

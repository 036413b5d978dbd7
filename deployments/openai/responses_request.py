"""ResponsesRequest: the body of /v1/responses, its input items, and the chat completion that answers it."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.conversation_fields import (
    MAX_MESSAGES,
    AssistantMessage,
    ChatMessage,
    ReasoningEffort,
    ToolMessage,
    message_of,
)
from deployments.openai.sampling_fields import EventOptions, SamplingRequest
from deployments.openai.structured_output import JsonObjectFormat, JsonSchema, JsonSchemaFormat, TextFormat
from deployments.openai.tools import ChosenFunction, Function, OfFunctions, PastCall, PastFunction, Tool, ToolChoice
from deployments.openai.types import MAX_KEYS, WHOLE, NumAlternatives, RequestModel, at_most, refused
from engine.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
_NOTHING_IS_STORED = "nothing is stored here; send the whole conversation as input"


class InputPart(RequestModel):
    """A piece of an item's text, or of an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: str


class InputThought(RequestModel):
    """A piece of thoughts."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(RequestModel):
    """Thoughts before an earlier answer, for chat templates that show them."""

    type: Literal["reasoning"]
    content: list[InputThought] | None = None
    """The thoughts."""


class InputMessage(RequestModel):
    """One message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(min_length=1)]


class InputCall(RequestModel):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text. It may have been cut by max_output_tokens."""


class InputCallResult(RequestModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    """The call."""
    output: str | Annotated[list[InputPart], Field(min_length=1)]


def _kind(item: Any) -> str:
    item_type = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return item_type if isinstance(item_type, str) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallResult, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Function, OfFunctions):
    """A function that the model may call; other kinds of tools are refused."""


class FunctionChoice(ChosenFunction, OfFunctions):
    """The function that must be called."""


def conversation(items: Sequence[Item]) -> list[ChatMessage]:
    """Make messages of items; calls join the assistant's message before them, and thoughts the message after them."""
    messages: list[ChatMessage] = []
    thoughts: str | None = None
    for item in items:
        match item:
            case InputReasoning():
                thoughts = "".join(part.text for part in item.content or ()) or None
                continue
            case InputMessage():
                messages.append(message_of(item.role, _text(item.content)))
            case InputCallResult():
                messages.append(ToolMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case InputCall():
                function = PastFunction(name=item.name, arguments=item.arguments)
                call = PastCall(type="function", id=item.call_id, function=function)
                last = messages[-1] if messages else None
                if isinstance(last, AssistantMessage) and thoughts is None:
                    calls = [*(last.tool_calls or []), call]
                    messages[-1] = last.model_copy(update={"tool_calls": calls})
                else:
                    messages.append(AssistantMessage(role="assistant", tool_calls=[call]))
        if thoughts is not None and isinstance(messages[-1], AssistantMessage):
            messages[-1] = messages[-1].model_copy(update={"reasoning_content": thoughts})
        thoughts = None
    return messages


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class NamedSchemaFormat(JsonSchema):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]


class TextOptions(RequestModel):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None
    """Any text, a JSON object, or JSON that a schema accepts."""


class Reasoning(RequestModel):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None
    """As `reasoning_effort` of /v1/chat/completions."""


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
    """The body of /v1/responses. Nothing is stored, so each request holds the whole conversation."""

    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    """What the user says, or the conversation."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """Tokens to generate at most; without it, all the room that is left."""
    text: TextOptions | None = None
    """The form of the answer."""
    reasoning: Reasoning | None = None
    """How much the model thinks."""
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    """Whether it must: auto (the default) leaves it to the model; a required call follows its schema."""
    parallel_tool_calls: bool | None = None
    """Whether several calls may be required at once (the default)."""
    include: list[Includable] | None = None
    """What else to send: log probabilities of the text, if it has no tools. The rest belongs to tools not here,
    or to thoughts, which are sent anyway, and changes nothing."""
    top_logprobs: NumAlternatives | None = None
    """Alternatives to list for each token; only with log probabilities included."""
    stream_options: EventOptions | None = None
    """How events are sent."""
    metadata: Annotated[dict[str, str], at_most(MAX_KEYS)] | None = None
    """Sent back with the answer."""
    previous_response_id: Annotated[None, refused(_NOTHING_IS_STORED)] = None
    """Refused: nothing is stored."""
    conversation: Annotated[None, refused(_NOTHING_IS_STORED)] = None
    """Refused: nothing is stored."""
    prompt: Annotated[None, refused("no prompts are stored here; send it as instructions and input")] = None
    """Refused: no prompts are stored."""

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request; raise RequestError if none is equivalent."""
        self.refuse_reports()
        has_logprobs = LOGPROBS in (self.include or [])
        if has_logprobs and self.tools:
            raise RequestError(f"{LOGPROBS} is not available with tools", "include")
        messages: list[ChatMessage] = []
        if self.instructions is not None:
            messages.append(message_of("system", self.instructions))
        messages += [message_of("user", self.input)] if isinstance(self.input, str) else conversation(self.input)
        if not messages:
            raise RequestError("input holds nothing but earlier thoughts", "input")
        return ChatCompletionRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self._response_format(),
            tools=self._tools() or None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
            **{name: getattr(self, name) for name in SamplingRequest.model_fields},
        )

    def _tools(self) -> list[Tool]:
        functions = [Function(**tool.model_dump(exclude={"type"})) for tool in self.tools or []]
        return [Tool(type="function", function=function) for function in functions]

    def _tool_choice(self) -> Literal["none", "auto", "required"] | ToolChoice | None:
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return ToolChoice(type="function", function=ChosenFunction(name=choice.name))
        # Clients send OpenAI's default also where there are no tools to choose from.
        return None if choice in ("auto", "none") and not self.tools else choice

    def _response_format(self) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
        text_format = self.text.format if self.text else None
        if isinstance(text_format, NamedSchemaFormat):
            return JsonSchemaFormat(type="json_schema", json_schema=text_format)
        return text_format


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return a chat completion request's error with the field names of the client's request."""
    message = str(error)
    for chat_name, name in names.items():
        # Without an index: messages are counted after the conversion.
        message = re.sub(rf"\b{re.escape(chat_name)}\b(\[\d+\])?", name, message)
    return type(error)(message, names.get(error.param or "", error.param))

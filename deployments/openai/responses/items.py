"""Input items: messages, calls and their results, as clients send them, and the conversation that they are."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from deployments.openai.fields import JsonObject, Name, RequestModel, Text
from deployments.openai.messages import AssistantMessage, ChatMessage, ToolMessage, message_of
from deployments.openai.tools import Function, PastCall, PastFunction, Tool


class InputPart(RequestModel):
    """A piece of an item's text, or of an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""
    logprobs: list[Any] | None = None
    """Accepted and ignored: earlier answers come back with it."""


class InputItem(RequestModel):
    """What items of all kinds share."""

    id: Text | None = None
    """Accepted and ignored: earlier answers come back with it."""
    status: Text | None = None
    """Accepted and ignored: earlier answers come back with it."""


class InputMessage(InputItem):
    """One message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], Field(min_length=1)]


class InputCall(InputItem):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Name
    arguments: Text
    """A JSON object, as text."""


class InputCallResult(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    """The call."""
    output: Text | Annotated[list[InputPart], Field(min_length=1)]


def _kind(item: Any) -> str:
    """Return the type of an item; messages need not say theirs."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallResult, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(RequestModel):
    """A function that the model may call; other kinds of tools are refused."""

    type: Literal["function"]
    name: Name
    """Its name."""
    description: Text | None = None
    """What it does, for the model."""
    parameters: JsonObject | None = None
    """The JSON schema of its arguments, an object; null is no arguments."""
    strict: bool | None = None
    """Accepted and ignored: a required call always matches the schema, a voluntary one need not."""

    def to_chat(self) -> Tool:
        """Return the same tool as chat completions have it."""
        function = Function(name=self.name, description=self.description, parameters=self.parameters)
        return Tool(type="function", function=function)


class FunctionChoice(RequestModel):
    """The function that must be called."""

    type: Literal["function"]
    name: Name


def conversation(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the messages that items are: calls belong to the assistant's message before them."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case InputMessage():
                messages.append(message_of(item.role, _text(item.content)))
            case InputCallResult():
                messages.append(ToolMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            case InputCall():
                function = PastFunction(name=item.name, arguments=item.arguments)
                call = PastCall(type="function", id=item.call_id, function=function)
                last = messages[-1] if messages else None
                if isinstance(last, AssistantMessage):
                    calls = [*(last.tool_calls or []), call]
                    messages[-1] = last.model_copy(update={"tool_calls": calls})
                else:
                    messages.append(AssistantMessage(role="assistant", tool_calls=[call]))
    return messages


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)

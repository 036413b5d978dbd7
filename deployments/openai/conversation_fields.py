"""The request fields of a conversation: its messages, the tools offered, and how it becomes a prompt."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from deployments.openai.tools import PastCall, Tool, ToolChoice
from deployments.openai.types import JsonObject, Name, RequestModel
from engine.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


def text_of(content: Content | None) -> str:
    """Return a content as one string."""
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


class Message(RequestModel):
    """What messages of all roles share: text, or parts of text. Other parts (images, audio) are refused."""

    content: Content | None
    name: Name | None = None
    """The speaker's name, for chat templates that show it."""

    def text(self) -> str:
        return text_of(self.content)


class SystemMessage(Message):
    """What the answer should be like."""

    role: Literal["system", "developer"]
    """Developer is another name for system."""
    content: Content


class UserMessage(Message):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantMessage(Message):
    """An earlier answer, as it came."""

    role: Literal["assistant"]
    content: Content | None = None
    """Null means no text, as in a message of tool calls."""
    tool_calls: list[PastCall] | None = None
    """The calls in it."""
    reasoning_content: str | None = None
    """What the model thought before it, for chat templates that show it."""
    reasoning: str | None = None
    """vLLM's name of reasoning_content, which wins."""

    @property
    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class ToolMessage(Message):
    """The result of a call."""

    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str
    """The call."""


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
_message: TypeAdapter[ChatMessage] = TypeAdapter(ChatMessage)
MAX_MESSAGES = 1024
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def message_of(role: Literal["system", "developer", "user", "assistant"], content: Content) -> ChatMessage:
    """Return a message of text."""
    message: ChatMessage = _message.validate_python({"role": role, "content": content})
    return message


class ConversationRequest(RequestModel):
    """The fields of requests that hold a conversation."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Whether it must: auto (the default with tools) leaves it to the model; a required call follows its schema."""
    add_generation_prompt: bool | None = None
    """End the prompt with what begins an answer (the default)."""
    continue_final_message: bool | None = None
    """End the prompt inside the last message, which the answer continues."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, such as `enable_thinking`; a variable that it does not read has no effect."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model thinks: a variable for the chat template. It also sets its switch, `enable_thinking` or
    `thinking`: `none` is off. Refused if the template reads none of them; `chat_template_kwargs` win."""

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template; raise RequestError if the request both continues and begins."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message, add_generation_prompt begins another",
                "continue_final_message",
            )
        return self.chat_template_kwargs or {}

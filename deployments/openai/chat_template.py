"""How a conversation becomes a prompt: the request fields that a chat template sees."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.openai.fields import JsonObject, RequestModel
from deployments.openai.tools import Tool, ToolChoice
from engine.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class Rendering:
    """How to render a conversation.

    Attributes:
        begins_answer: end the prompt with what begins an answer.
        continues_last: end the prompt inside the last message, which the answer goes on with.
        adds_special_tokens: add the tokens that the tokenizer puts around a text.
        tools: the functions that the model is told of.
        variables: more variables of the template.
    """

    begins_answer: bool = True
    continues_last: bool = False
    adds_special_tokens: bool = False
    tools: list[Tool] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)


class ConversationRequest(RequestModel):
    """The fields of requests that hold a conversation."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """What the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Whether it must: auto (the default with tools) leaves it to the model; a required call follows its schema."""
    add_generation_prompt: bool | None = None
    """End the prompt with what begins an answer (the default)."""
    continue_final_message: bool | None = None
    """End the prompt inside the last message, which the answer goes on with."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the chat template, such as `enable_thinking`; those that it does not read have no effect."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable for the chat template; also sets `enable_thinking`, unless `chat_template_kwargs` do."""

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def rendering(self, *, adds_special_tokens: bool | None) -> Rendering:
        """Return how to render the conversation.

        Raises:
            RequestError: the last message is to be continued, and another one to be begun.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on with the last message, add_generation_prompt begins another",
                "continue_final_message",
            )
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables = {
                "enable_thinking": self.reasoning_effort != "none",
                **variables,
                "reasoning_effort": self.reasoning_effort,
            }
        return Rendering(
            begins_answer=self.add_generation_prompt is not False and not self.continue_final_message,
            continues_last=bool(self.continue_final_message),
            adds_special_tokens=bool(adds_special_tokens),
            tools=self.offered_tools,
            variables=variables,
        )

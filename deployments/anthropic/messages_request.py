"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chat completion request that they become."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deployments.anthropic.message_blocks import Turn, conversation
from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.conversation_fields import MAX_MESSAGES, AssistantMessage, Content, ReasoningEffort, message_of
from deployments.openai.sampling_fields import CommonRequest
from deployments.openai.structured_output import JsonSchema, JsonSchemaFormat
from deployments.openai.tools import ChosenFunction, Function, Tool, ToolChoice
from deployments.openai.types import WHOLE, JsonObject, Name, RequestModel, StopString
from engine.errors import RequestError

BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that differs in every request: no cached prefix would match after it."""


class CustomTool(RequestModel):
    """A tool that the client runs; Anthropic's own tools, which servers run, are refused."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: JsonObject
    """The JSON schema of its input, an object."""


class Choice(RequestModel):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None
    """Whether at most one call may be required at once."""


class NamedChoice(ChosenFunction):
    """The tool that must be called, once."""

    type: Literal["tool"]
    disable_parallel_tool_use: bool | None = None
    """Accepted and ignored: with a named tool, one call is required anyway."""


class Thinking(RequestModel):
    """Whether the model thinks: the variables `enable_thinking` and `thinking` of the chat template."""

    type: Literal["enabled", "adaptive", "disabled"]


class SchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    """The form of the answer."""

    effort: ReasoningEffort | None = None
    """As `reasoning_effort` of /v1/chat/completions; without effect on a template that reads none of its variables."""
    format: SchemaFormat | None = None
    """What the answer must match."""


class ClearThinking(RequestModel):
    """The one edit that changes nothing; others are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class CountTokensRequest(RequestModel):
    """The body of /v1/messages/count_tokens: a conversation, and what shapes its prompt."""

    model: str | None = None
    """The served model's name; null is the only one."""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation. Blocks other than text, calls, results and thoughts are refused, such as images."""
    system: Content | None = None
    """A system message before the conversation. Claude Code's billing header is left out."""
    tools: Annotated[list[CustomTool], Field(max_length=128)] | None = None
    """What the model may call."""
    tool_choice: Annotated[Choice | NamedChoice, Field(discriminator="type")] | None = None
    """Whether it must: auto (the default with tools) leaves it to the model; a required call follows its schema."""
    thinking: Thinking | None = None
    """Whether the model thinks, if its chat template has a switch; without it, as the template decides."""
    output_config: OutputConfig | None = None
    """The form of the answer."""
    context_management: dict[Literal["edits"], list[ClearThinking]] | None = None
    """Accepted and ignored: the only edit allowed changes nothing."""

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request; raise RequestError if it has too many messages."""
        messages, system, output = conversation(self.messages), self.system, self.output_config or OutputConfig()
        if isinstance(system, list):
            system = [part for part in system if not part.text.startswith(BILLING_HEADER)]
        if system:
            messages.insert(0, message_of("system", system))
        if len(messages) > MAX_MESSAGES:
            count = f"{len(messages):,} with system and each result of a call"
            raise RequestError(f"messages holds {count}, at most {MAX_MESSAGES:,} are allowed", "messages")
        functions = [
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or []
        ]
        schema = JsonSchema(schema=output.format.schema_) if output.format else None
        is_begun = isinstance(messages[-1], AssistantMessage)
        return ChatCompletionRequest(
            messages=messages,
            tools=[Tool(type="function", function=function) for function in functions] or None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
            chat_template_kwargs=self._template_variables() or None,
            response_format=JsonSchemaFormat(type="json_schema", json_schema=schema) if schema else None,
        )

    def _template_variables(self) -> dict[str, Any]:
        """Return variables that make a template think; clients send them to any model, so no template refuses them."""
        effort = self.output_config.effort if self.output_config else None
        thinks = None if effort is None else effort != "none"
        if self.thinking:
            thinks = self.thinking.type != "disabled"
        switches = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
        return {name: value for name, value in switches.items() if value is not None}

    def _tool_choice(self) -> Literal["none", "auto", "required"] | ToolChoice | None:
        match self.tool_choice:
            case NamedChoice(name=name):
                return ToolChoice(type="function", function=ChosenFunction(name=name))
            case Choice(type="any"):
                return "required"
            case Choice(type="auto" | "none" as choice) if self.tools:
                return choice
        return None


class MessagesRequest(CountTokensRequest, CommonRequest):
    """The body of /v1/messages."""

    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {
        "messages": "messages",
        "response_format.json_schema.schema": "output_config.format.schema",
        "stop": "stop_sequences",
    }

    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE]
    """Tokens to generate at most."""
    stop_sequences: Annotated[list[StopString], Field(max_length=4)] | None = None
    """Strings that end the text, which does not include them."""

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request; raise RequestError for too many messages, or a trace."""
        self.refuse_reports()
        shared = {name: getattr(self, name) for name in (*CommonRequest.model_fields, "max_tokens")}
        return super().to_chat().model_copy(update={**shared, "stop": self.stop_sequences})

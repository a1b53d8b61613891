"""The messages of a chat, as requests and files hold them.

Types are strict ("5" is no number), unknown fields are ignored.

Runs on: any (pure).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Wire(BaseModel):
    """Part of a request body."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class FunctionCall(Wire):
    """What the assistant called; arguments are JSON text, from some clients an object."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Wire):
    """A call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Wire):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

"""What a request says its output must match, by OpenAI's, SGLang's and vLLM's names.

    response_format                                   OpenAI
    json_schema, regex, ebnf, structural_tag          SGLang
    structured_outputs.{json, regex, choice, ...}     vLLM
    guided_{json, regex, choice, grammar}             vLLM before 0.12

Runs on: any (pure).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..engine.api.chat import Wire
from ..engine.api.errors import RequestError
from ..engine.api.grammar import JSON_OBJECT, GrammarKind, GrammarSpec

MAX_CHOICES = 10_000

Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
Schema = dict[str, Any] | bool | str  # a text holds the schema as JSON


class ResponseFormat(Wire):
    """Free text, or what the text must match."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = Field(None, max_length=1000)
    triggers: list[str] | None = Field(None, max_length=1000)

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema":
            schema = (self.json_schema or {}).get("schema")
            if not isinstance(schema, dict | bool):
                raise RequestError(
                    "response_format: json_schema needs a schema",
                    param="response_format.json_schema.schema",
                )
        if self.type == "structural_tag" and (self.format is None) == (self.structures is None):
            raise RequestError(
                "response_format: structural_tag needs a format (or structures and triggers)",
                param="response_format.format",
            )
        return self

    def spec(self) -> GrammarSpec | None:
        """What the output must match; None for free text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JSON_OBJECT
        if self.type == "json_schema":
            assert self.json_schema is not None
            return _json_schema(self.json_schema["schema"], "response_format.json_schema.schema")
        tag = self.model_dump(exclude={"type", "json_schema"}, exclude_none=True)
        return GrammarSpec("structural_tag", _dump(tag))


class StructuredOutputs(BaseModel):
    """vLLM's structured_outputs. Its switches that change the language are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class StructureFields(Wire):
    """The fields of all these names, in chat, completions and /generate."""

    response_format: ResponseFormat | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: Choices | None = None
    structural_tag: dict[str, Any] | str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def grammar(self) -> GrammarSpec | None:
        """What the output must match, None for free text.

        Raises:
            RequestError: two of them are given.
        """
        found = [spec for spec in self._given() if spec is not None]
        if len(found) > 1:
            raise RequestError(
                f"{found[0].param} and {found[1].param} exclude each other", param=found[1].param
            )
        return found[0] if found else None

    def _given(self) -> list[GrammarSpec | None]:
        form, more = self.response_format, self.structured_outputs
        inner = more or StructuredOutputs()
        under = "structured_outputs"
        return [
            form.spec() if form else None,
            _made(_json_schema, self.json_schema, "json_schema"),
            _made(_json_schema, self.guided_json, "guided_json"),
            _made(_json_schema, inner.json_, f"{under}.json"),
            _text("regex", self.regex, "regex"),
            _text("regex", self.guided_regex, "guided_regex"),
            _text("regex", inner.regex, f"{under}.regex"),
            _text("ebnf", self.ebnf, "ebnf"),
            _text("ebnf", self.guided_grammar, "guided_grammar"),
            _text("ebnf", inner.grammar, f"{under}.grammar"),
            _made(_choice, self.choice, "choice"),
            _made(_choice, self.guided_choice, "guided_choice"),
            _made(_choice, inner.choice, f"{under}.choice"),
            _made(_tag, self.structural_tag, "structural_tag"),
            _made(_tag, inner.structural_tag, f"{under}.structural_tag"),
            JSON_OBJECT if inner.json_object else None,
        ]


def _made(make: Callable[[Any, str], GrammarSpec], value: Any, param: str) -> GrammarSpec | None:
    return None if value is None else make(value, param)


def _text(kind: GrammarKind, value: str | None, param: str) -> GrammarSpec | None:
    return None if value is None else GrammarSpec(kind, value, param=param)


def _json_schema(value: Schema, param: str) -> GrammarSpec:
    return GrammarSpec("json_schema", _json_text(value, param), param=param)


def _tag(value: dict[str, Any] | str, param: str) -> GrammarSpec:
    return GrammarSpec("structural_tag", _json_text(value, param), param=param)


def _choice(value: list[str], param: str) -> GrammarSpec:
    return GrammarSpec("choice", _dump(value), param=param)


def _json_text(value: Any, param: str) -> str:
    """JSON of a value that is sent as JSON or as a text of it, in one spelling."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"{param} is not JSON: {error}", param=param) from None
    return _dump(value)


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()

"""What an output must match, as a request says it.

Runs on: any (pure).
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from .errors import RequestError

GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What may come before the structure, free.

    Attributes:
        ends: the structure begins behind the token that completes one of these texts.
        begins: where the prompt has not opened the reasoning, the tokens of each text that does. An
            output that begins otherwise is the structure from its first token on.
        is_open: the output begins inside of the reasoning.
    """

    ends: tuple[str, ...]
    begins: tuple[tuple[int, ...], ...] = ()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar before it is compiled.

    Attributes:
        kind: how to read `source`.
        source: JSON text of the schema, of the list of choices, or of the structural tag; else the
            regular expression (of the whole output) or the grammar in GBNF.
        reasoning: what may come before it, unconstrained.
        param: the request's field, for errors.
    """

    kind: GrammarKind
    source: str
    reasoning: Reasoning | None = None
    param: str = field(default="response_format", compare=False)

    def __post_init__(self) -> None:
        """Raise RequestError for what is no grammar."""
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise RequestError(f"no grammar of kind {self.kind!r}, want {kinds}", param=self.param)
        if not isinstance(self.source, str):
            kind = type(self.source).__name__
            raise RequestError(f"a grammar's source must be text, got a {kind}", param=self.param)


JSON_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')

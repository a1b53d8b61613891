"""A request's source as one grammar library enforces it.

Runs on: worker.
"""

import json
from collections.abc import Callable

from . import regex, schema, structural_tag
from .api import GrammarError

MAX_NESTING = 200  # brackets of a source, whatever they mean


def check_nesting(source: str) -> None:
    """Raise SchemaError for a source that is nested too deep to look at."""
    depth = deepest = 0
    for char in source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    if deepest > MAX_NESTING:
        raise schema.SchemaError("", f"nested {deepest} deep, the limit is {MAX_NESTING}")


def translate(kind: str, source: str, library: str) -> tuple[str, str]:
    """Kind and source as a library enforces them.

    Raises:
        schema.SchemaError: the source is wrong.
        GrammarError: this library cannot enforce it.
    """
    reader: Callable[[str, str], tuple[str, str]] = {
        "json_schema": _json_schema,
        "regex": _regex,
        "choice": _choice,
        "structural_tag": structural_tag.translate,
        "ebnf": lambda source, _: ("ebnf", source),
    }[kind]
    return reader(source, library)


def _json_schema(source: str, library: str) -> tuple[str, str]:
    return "json_schema", json.dumps(schema.rebuild(json.loads(source), library))


def _regex(source: str, library: str) -> tuple[str, str]:
    try:
        node = regex.anchored(regex.parse(source), search=False)
    except GrammarError as error:
        raise schema.SchemaError("", str(error)) from None
    if library == "xgrammar" and regex.has_property(node):
        raise GrammarError("Unicode properties cannot be enforced by xgrammar")
    return "regex", regex.write(node)


def _choice(source: str, library: str) -> tuple[str, str]:
    texts = json.loads(source)
    return "regex", regex.write(regex.Alt(tuple(map(regex.literal, dict.fromkeys(texts)))))

"""Structural tags: text with structures in it, in xgrammar's notation.

The schemas and expressions inside are rewritten as those of whole outputs are. For llguidance a tag
without free text becomes a Lark grammar.

Runs on: any (pure).
"""

import json
from collections.abc import Callable
from typing import Any

from . import regex, schema
from .api import MAX_WHITESPACE, GrammarError

MAX_DEPTH = 32
# The fields of each format beside its type; those with formats inside are walked by hand.
FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style"},
    "any_text": {"excludes", "max_tokens", "max_chars"},
    "token": {"token"},
    "exclude_token": {"exclude_tokens"},
    "any_tokens": {"exclude_tokens", "max_tokens"},
    "grammar": {"grammar", "syntax"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    "token_triggered_tags": {
        *("trigger_tokens", "tags", "exclude_tokens", "at_least_one", "stop_after_first"),
    },
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"min", "max", "content"},
    "dispatch": {"rules", "loop", "excludes"},
    "token_dispatch": {"rules", "loop", "exclude_tokens"},
}

# Those without which a library fails, not always in a way that tells the client.
REQUIRED = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "token": {"token"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags"},
    "token_triggered_tags": {"trigger_tokens", "tags"},
    "tags_with_separator": {"tags", "separator"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"min", "max", "content"},
    "dispatch": {"rules"},
    "token_dispatch": {"rules"},
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and -1 <= value < 1 << 31


def _is_token(value: Any) -> bool:
    return _is_text(value) or (type(value) is int and 0 <= value < 1 << 31)


def _is_sign(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("type") == "token" and _is_token(value.get("token"))
    return _is_text(value)


def _is_list(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_rule(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_token(value[0])


_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (_is_text, "a text")
_TEXTS = (_is_list(_is_text), "a list of texts")
_TOKENS = (_is_list(_is_token), "a list of tokens: texts or ids")
_COUNT = (_is_count, "a number")
_FORMATS = (_is_list(lambda value: isinstance(value, dict)), "a list of formats")
# What the fields hold that are walked no further.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "value": _TEXT,
    "style": _TEXT,
    "grammar": _TEXT,
    "syntax": _TEXT,
    "pattern": _TEXT,
    "separator": (_is_sign, "a text or a token"),
    "begin": (_is_sign, "a text or a token"),
    "end": (
        lambda value: _is_sign(value) or (_is_list(_is_sign)(value) and len(value) > 0),
        "a text, a token, or a list of these",
    ),
    "token": (_is_token, "a text or an id"),
    "excludes": _TEXTS,
    "triggers": _TEXTS,
    "trigger_tokens": _TOKENS,
    "exclude_tokens": _TOKENS,
    "max_tokens": _COUNT,
    "max_chars": _COUNT,
    "min": _COUNT,
    "max": _COUNT,
    "at_least_one": _FLAG,
    "stop_after_first": _FLAG,
    "loop": _FLAG,
    "elements": _FORMATS,
    "tags": _FORMATS,
    "rules": (_is_list(_is_rule), "a list of pairs"),
}


def translate(source: str, library: str) -> tuple[str, str]:
    """Kind and source as a library enforces them. Raises GrammarError."""
    form = _format(_modern(json.loads(source)), "/format", library, 0)
    if library == "xgrammar":
        return "structural_tag", json.dumps({"type": "structural_tag", "format": form})
    return "lark", _Lark().grammar(form)


def _modern(tag: Any) -> Any:
    """The format of a tag; `structures` and `triggers` is how it was written first."""
    if not isinstance(tag, dict):
        raise schema.SchemaError("", "a structural tag is an object")
    if "structures" not in tag:
        return tag.get("format")
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(s, dict) for s in structures):
        raise schema.SchemaError("/structures", "structures is a list of objects")
    for i, one in enumerate(structures):
        for name in ("begin", "end"):
            if not _is_sign(one.get(name)):
                raise schema.SchemaError(f"/structures/{i}/{name}", f"{name} is a text")
    if not _TEXTS[0](tag.get("triggers")):
        raise schema.SchemaError("/triggers", "triggers is a list of texts")
    tags = [
        {
            "type": "tag",
            "begin": s["begin"],
            "content": {"type": "json_schema", "json_schema": s.get("schema", True)},
            "end": s["end"],
        }
        for s in structures
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _format(node: Any, at: str, library: str, depth: int) -> dict[str, Any]:
    """A format whose schemas are rewritten for a library."""
    kind = node.get("type") if isinstance(node, dict) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise schema.SchemaError(at, f"want a format, got {json.dumps(kind)[:64]}")
    if depth > MAX_DEPTH:
        raise schema.SchemaError(at, f"formats are nested more than {MAX_DEPTH} deep")
    unknown = sorted(node.keys() - FIELDS[kind] - {"type"})
    if unknown:
        raise schema.SchemaError(f"{at}/{unknown[0]}", f"{kind} has no field of this name")
    for name in sorted(REQUIRED.get(kind, set()) - node.keys()):
        raise schema.SchemaError(f"{at}/{name}", f"{kind} needs this field")
    for name, value in node.items():
        if (check := CHECKS.get(name)) and not check[0](value):
            raise schema.SchemaError(f"{at}/{name}", f"{name} is {check[1]}")
    out = dict(node)
    if kind == "json_schema":
        try:
            out["json_schema"] = schema.rebuild(node.get("json_schema"), library)
        except schema.SchemaError as error:
            raise schema.SchemaError(f"{at}/json_schema{error.pointer}", error.reason) from None
        except schema.Unenforceable as error:
            raise schema.Unenforceable(f"{at}/json_schema{error.pointer}", error.reason) from None
        out["max_whitespace_cnt"] = MAX_WHITESPACE
    elif kind == "regex":
        try:
            tree = regex.anchored(regex.parse(node["pattern"]), search=False)
        except GrammarError as error:
            raise schema.SchemaError(f"{at}/pattern", str(error)) from None
        out["pattern"] = regex.write(tree)
    if "content" in node:
        out["content"] = _format(node["content"], f"{at}/content", library, depth + 1)
    for name in ("elements", "tags"):
        if name in node:
            out[name] = [
                _format(item, f"{at}/{name}/{i}", library, depth + 1)
                for i, item in enumerate(node[name])
            ]
    if "rules" in node:
        out["rules"] = [
            [sign, _format(form, f"{at}/rules/{i}/1", library, depth + 1)]
            for i, (sign, form) in enumerate(node["rules"])
        ]
    return out


class _Lark:
    """Writes a format as a Lark grammar in llguidance's dialect."""

    def __init__(self) -> None:
        self._rules: list[str] = []

    def grammar(self, form: dict[str, Any]) -> str:
        """The grammar of a whole output."""
        start = self._expression(form)
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, body: str) -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, dict) and value.get("type") == "token":
            return self._expression(value)
        if isinstance(value, list):
            return "(" + " | ".join(map(self._text, value)) + ")"
        return json.dumps(value, ensure_ascii=False) if value else '""'

    def _expression(self, form: dict[str, Any]) -> str:
        match form["type"]:
            case "const_string":
                return self._text(form.get("value"))
            case "json_schema" if form.get("style", "json") == "json":
                spaces = rf"[ \n\t\r]{{0,{MAX_WHITESPACE}}}"
                options = {"x-guidance": {"whitespace_pattern": spaces}}
                return self._rule(f"%json {json.dumps(form['json_schema'] | options)}")
            case "regex":
                return self._rule(f"/{form['pattern']}/")
            case "token" if isinstance(form.get("token"), int):
                return f"<[{form['token']}]>"
            case "sequence":
                return "(" + " ".join(map(self._expression, form["elements"])) + ")"
            case "or":
                return "(" + " | ".join(map(self._expression, form["elements"])) + ")"
            case "tag":
                content = self._expression(form["content"])
                return f"({self._text(form['begin'])} {content} {self._text(form['end'])})"
            case "optional" | "plus" | "star" as kind:
                sign = {"optional": "?", "plus": "+", "star": "*"}[kind]
                return f"({self._expression(form['content'])}){sign}"
            case "tags_with_separator":
                each = self._rule(" | ".join(map(self._expression, form["tags"])))
                more = f"({self._text(form['separator'])} {each})*"
                once = each if form.get("stop_after_first") else f"({each} {more})"
                return once if form.get("at_least_one") else f"({once})?"
        raise GrammarError(f"the format {form['type']!r} cannot be enforced by llguidance")

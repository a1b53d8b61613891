"""JSON Schema (draft 2020-12), rewritten into what a grammar library really enforces.

Libraries ignore keywords silently: xgrammar reads `anyOf` beside `properties` as `anyOf` alone, and
`minLength` beside `pattern` as `pattern`. So nothing reaches a library as the client wrote it. A
schema is rebuilt keyword by keyword for one library; a keyword that this library does not enforce
at its place raises Unenforceable with its JSON pointer. Keywords that assert nothing (titles,
defaults, unknown names) are left out, references are resolved into `$defs` of our own.

What each library enforces was found by sampling against the `jsonschema` package; tests/grammar
repeats it. Where the rewritten schema is narrower than the client's, it is on purpose: with
xgrammar objects have the properties that are named, in their order, and no others unless
`additionalProperties` says so.

Runs on: any (pure).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from . import regex
from .api import GrammarError

Schema = dict[str, Any] | bool

MAX_DEPTH = 64
MAX_SCHEMAS = 20_000
MAX_PROPERTIES = 1000  # of one object: xgrammar's work grows with their square
MAX_COUNTED = 10_000  # properties times minProperties or maxProperties
MAX_EXACT = 2**53  # beyond it numbers lose their digits in every library
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
KEYWORDS_OF = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
APPLICATORS = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
# No library enforces these. `then`, `minContains` and the like say nothing without them.
NEVER = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
FORMATS = {
    "xgrammar": ("json-pointer", "relative-json-pointer", "uri-reference"),
    "llguidance": (
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        "uuid",
    ),
}
# What stands in a JSON string only escaped; xgrammar would write it as it is.
_ESCAPED = '"\\' + "".join(map(chr, range(0x20))) + "\x7f"


class Unenforceable(GrammarError):
    """One library cannot enforce a keyword; another may."""

    def __init__(self, pointer: str, reason: str):
        super().__init__(f"{pointer or '/'}: {reason}")
        self.pointer = pointer
        self.reason = reason


class SchemaError(GrammarError):
    """No library can help: the schema is wrong, or nothing satisfies it."""

    def __init__(self, pointer: str, reason: str):
        super().__init__(f"{pointer or '/'}: {reason}")
        self.pointer = pointer
        self.reason = reason


def rebuild(schema: Any, library: str) -> dict[str, Any]:
    """A schema for one library ("xgrammar" or "llguidance") that it enforces as a whole.

    Raises:
        Unenforceable: with the pointer of the first keyword that this library does not enforce.
        SchemaError: the schema is invalid, or has no finite instance.
    """
    return _Rebuilder(schema, library).run()


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class _Rebuilder:
    def __init__(self, root: Any, library: str):
        self._root = root
        self._library = library
        self._is_xgrammar = library == "xgrammar"
        self._names: dict[str, str] = {}  # pointer of a referenced schema to its name in $defs
        self._pending: list[tuple[str, Any]] = []
        self._num_schemas = 0

    def run(self) -> dict[str, Any]:
        body = self._schema(self._root, "", 0)
        defs: dict[str, Schema] = {}
        while self._pending:
            pointer, target = self._pending.pop()
            defs[self._names[pointer]] = self._schema(target, pointer, 0)
        pointers = {name: pointer for pointer, name in self._names.items()}
        if (name := _find_cycle(defs)) is not None:
            raise SchemaError(pointers[name], "a $ref that leads back to itself")
        finite = _finite_defs(defs)
        if not _is_finite(body, finite):
            raise SchemaError("", "nothing finite satisfies this schema")
        if body is False:
            raise SchemaError("", "nothing satisfies this schema")
        whole = {} if body is True else dict(body)
        return whole | {"$defs": defs} if defs else whole

    def _no(self, pointer: str, reason: str) -> Unenforceable:
        return Unenforceable(pointer, f"{reason} cannot be enforced by {self._library}")

    # -- one schema

    def _schema(self, schema: Any, at: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(at, "a schema is an object, true or false")
        self._num_schemas += 1
        if depth > MAX_DEPTH:
            raise SchemaError(at, f"schemas are nested more than {MAX_DEPTH} deep")
        if self._num_schemas > MAX_SCHEMAS:
            raise SchemaError(at, f"there are more than {MAX_SCHEMAS} schemas in this one")
        for keyword in NEVER:
            if keyword in schema:
                raise self._no(f"{at}/{keyword}", f"{keyword!r}")
        if isinstance(schema.get("items"), list):
            raise self._no(f"{at}/items", "a list under 'items' (now called 'prefixItems')")
        if "$id" in schema and at:
            raise self._no(f"{at}/$id", "an inner '$id'")
        schema = self._without_unevaluated(schema, at)
        types = self._types(schema, at)
        present = [keyword for keyword in APPLICATORS if keyword in schema]
        if present and self._is_xgrammar:
            self._alone(schema, present, at)
        parts = [
            self._ref(schema, at)
            if keyword == "$ref"
            else {"enum": self._values(schema, types, at)}
            if keyword in ("enum", "const")
            else self._branches(schema, keyword, at, depth)
            for keyword in present
            if keyword != "const" or "enum" not in schema
        ]
        if not present or not self._is_xgrammar:
            parts.insert(0, self._typed(schema, types, at, depth))
        return _intersection(parts)

    def _alone(self, schema: Mapping[str, Any], present: list[str], at: str) -> None:
        """xgrammar reads an applicator alone: what stands beside it would be ignored."""
        allowed = {present[0]}
        if present[0] in ("enum", "const"):
            allowed = {"enum", "const", "type"}
        named = (*APPLICATORS, "type", *(k for names in KEYWORDS_OF.values() for k in names))
        for keyword in named:
            if keyword in schema and keyword not in allowed:
                reason = f"{keyword!r} beside {present[0]!r}"
                raise self._no(f"{at}/{keyword}", reason)

    def _types(self, schema: Mapping[str, Any], at: str) -> tuple[str, ...] | None:
        """The types that `type` allows, None for all of them."""
        given = schema.get("type")
        if given is None:
            return None
        names = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            raise SchemaError(f"{at}/type", f"an unknown type {json.dumps(given)[:80]}")
        return tuple(dict.fromkeys(names))

    def _values(
        self, schema: Mapping[str, Any], types: tuple[str, ...] | None, at: str
    ) -> list[Any]:
        values = schema.get("enum", [schema.get("const")])
        keyword = "enum" if "enum" in schema else "const"
        if not isinstance(values, list) or not values:
            raise SchemaError(f"{at}/enum", "enum is a list that is not empty")
        if "enum" in schema and "const" in schema:
            values = [v for v in values if _same(v, schema["const"])]
        if types is not None:
            values = [v for v in values if any(_is_of(v, t) for t in types)]
        if not values:
            raise SchemaError(f"{at}/{keyword}", "no value fits the keywords beside it")
        for number in _numbers(values):
            if abs(number) > MAX_EXACT:
                raise self._no(f"{at}/{keyword}", f"a number beyond {MAX_EXACT}")
        return values

    def _without_unevaluated(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Where nothing else evaluates, `unevaluated...` is another name for the rest."""
        for keyword, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if keyword in schema:
                if any(k in schema for k in ("$ref", "anyOf", "oneOf", "allOf")):
                    raise self._no(f"{at}/{keyword}", f"{keyword!r} beside applicators")
                schema = {plain: schema[keyword], **schema}
        return schema

    # -- applicators

    def _ref(self, schema: Mapping[str, Any], at: str) -> Schema:
        given, at = schema["$ref"], f"{at}/$ref"
        if not isinstance(given, str):
            raise SchemaError(at, "a $ref is a text")
        base, _, fragment = given.partition("#")
        root_id = self._root.get("$id", "") if isinstance(self._root, dict) else ""
        if base and base != root_id:
            raise self._no(at, "a reference to another document")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            pointer, target = self._anchor(fragment, at)
        else:
            pointer, target = fragment, self._follow(fragment, at)
        if pointer not in self._names:
            self._names[pointer] = f"r{len(self._names)}"
            self._pending.append((pointer, target))
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _follow(self, pointer: str, at: str) -> Any:
        target = self._root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise SchemaError(at, f"there is nothing at #{pointer[:128]}")
        return target

    def _anchor(self, name: str, at: str) -> tuple[str, Any]:
        for pointer, node in _walk(self._root, ""):
            if node.get("$anchor") == name:
                return pointer, node
        raise SchemaError(at, f"there is no $anchor {name[:128]!r}")

    def _branches(self, schema: Mapping[str, Any], keyword: str, at: str, depth: int) -> Schema:
        given = schema[keyword]
        if not isinstance(given, list) or not given:
            raise SchemaError(f"{at}/{keyword}", f"{keyword} is a list that is not empty")
        branches = [
            self._schema(branch, f"{at}/{keyword}/{i}", depth + 1) for i, branch in enumerate(given)
        ]
        if keyword == "allOf":
            if self._is_xgrammar and len(branches) > 1:
                raise self._no(f"{at}/allOf", "'allOf' with several schemas")
            return branches[0] if self._is_xgrammar else {"allOf": branches}
        if keyword == "oneOf" and not self._are_disjoint(given):
            if self._is_xgrammar:
                raise self._no(f"{at}/oneOf", "'oneOf' whose alternatives may overlap")
            return {"oneOf": branches}  # llguidance proves that they are disjoint, or refuses
        branches = [b for b in branches if b is not False]
        if not branches:
            return False
        return branches[0] if len(branches) == 1 and self._is_xgrammar else {"anyOf": branches}

    def _are_disjoint(self, branches: list[Any]) -> bool:
        """Whether no value satisfies two of these: by type, or by a property that tells them."""
        known = [self._resolved(branch) for branch in branches]
        if len(branches) > 200:
            return False
        return all(_differ(one, other) for i, one in enumerate(known) for other in known[i + 1 :])

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(16):
            if not isinstance(schema, dict):
                return {}
            if not isinstance(schema.get("$ref"), str) or not schema["$ref"].startswith("#/"):
                return schema
            try:
                schema = self._follow(unquote(schema["$ref"][1:]), "")
            except SchemaError:
                return {}
        return {}

    # -- assertions by type

    def _typed(
        self, schema: dict[str, Any], types: tuple[str, ...] | None, at: str, depth: int
    ) -> Schema:
        used = [kind for kind, names in KEYWORDS_OF.items() if any(k in schema for k in names)]
        if types is None:
            if not used:
                return True
            # Who writes `properties` without `type` means an object; of several kinds, any type.
            types = tuple(used) if len(used) == 1 else tuple(t for t in TYPES if t != "integer")
            if not self._is_xgrammar and any(k in schema for k in APPLICATORS):
                return self._merged(schema, at, depth)
        each = [self._of_type(schema, t, at, depth) for t in types]
        kept = [s for s in each if s is not False]
        if not kept:
            return False
        return kept[0] if len(kept) == 1 else {"anyOf": kept}

    def _merged(self, schema: dict[str, Any], at: str, depth: int) -> Schema:
        """All assertions in one schema, for a library that intersects it with what is beside."""
        merged: dict[str, Any] = {}
        for kind, names in KEYWORDS_OF.items():
            if any(k in schema for k in names):
                part = self._of_type(schema, kind, at, depth)
                merged |= {} if isinstance(part, bool) else part
        merged.pop("type", None)
        return merged

    def _of_type(self, schema: dict[str, Any], kind: str, at: str, depth: int) -> Schema:
        match kind:
            case "string":
                return self._string(schema, at)
            case "number" | "integer":
                return self._number(schema, kind, at)
            case "array":
                return self._array(schema, at, depth)
            case "object":
                return self._object(schema, at, depth)
        return {"type": kind}

    def _string(self, schema: Mapping[str, Any], at: str) -> Schema:
        out: dict[str, Any] = {"type": "string"}
        low, high = self._counts(schema, "minLength", "maxLength", at)
        if low:
            out["minLength"] = low
        if high is not None:
            out["maxLength"] = high
            if low > high:
                return False
        if "pattern" in schema:
            out["pattern"] = self._pattern(schema["pattern"], f"{at}/pattern")
        if (name := schema.get("format")) is not None:
            if not isinstance(name, str) or name not in FORMATS[self._library]:
                raise self._no(f"{at}/format", f"the format {json.dumps(name)[:64]}")
            out["format"] = name
        if self._is_xgrammar:
            kinds = [k for k in ("pattern", "format", "minLength", "maxLength") if k in schema]
            if len(kinds) > 1 and kinds != ["minLength", "maxLength"]:
                raise self._no(f"{at}/{kinds[1]}", f"{kinds[1]!r} beside {kinds[0]!r}")
            if out.keys() & {"minLength", "maxLength"}:
                # Its own lengths let control characters pass, which JSON must escape.
                plain = regex.without(regex.Chars(regex.ANY), _ESCAPED)
                assert plain is not None
                body = regex.Repeat(plain, low, regex.UNBOUNDED if high is None else high)
                return {"type": "string", "pattern": f"^{regex.write(body)}$"}
        return out

    def _pattern(self, text: Any, at: str) -> str:
        if not isinstance(text, str):
            raise SchemaError(at, "a pattern is a text")
        try:
            node = regex.anchored(regex.parse(text), search=True)
        except GrammarError as error:
            raise SchemaError(at, str(error)) from None
        if self._is_xgrammar:
            if regex.has_property(node):
                raise self._no(at, "a Unicode property")
            plain = regex.without(node, _ESCAPED)
            if plain is None:
                raise self._no(at, "a pattern with escaped characters")
            node = plain
        else:
            node = regex.escapable(node)
        body = regex.write(node)
        return f"^(?:{body})$"

    def _number(self, schema: Mapping[str, Any], kind: str, at: str) -> Schema:
        out: dict[str, Any] = {"type": kind}
        for keyword in KEYWORDS_OF["number"]:
            if keyword not in schema:
                continue
            value = schema[keyword]
            if not _is_number(value):
                raise SchemaError(f"{at}/{keyword}", f"{keyword} is a number")
            if abs(value) > MAX_EXACT:
                raise self._no(f"{at}/{keyword}", f"a number beyond {MAX_EXACT}")
            out[keyword] = value
        if kind == "integer":
            _round_bounds(out)
        if "multipleOf" in out:
            step = out["multipleOf"]
            if step <= 0:
                raise SchemaError(f"{at}/multipleOf", "multipleOf is above 0")
            if self._is_xgrammar and (kind != "integer" or step != int(step)):
                raise self._no(f"{at}/multipleOf", "'multipleOf' of numbers that are not whole")
        return False if _is_empty_range(out) else out

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> Schema:
        out: dict[str, Any] = {"type": "array"}
        low, high = self._counts(schema, "minItems", "maxItems", at)
        if schema.get("uniqueItems") is True and (high is None or high > 1):
            raise self._no(f"{at}/uniqueItems", "'uniqueItems'")
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise SchemaError(f"{at}/prefixItems", "prefixItems is a list")
        first = [
            self._schema(item, f"{at}/prefixItems/{i}", depth + 1)
            for i, item in enumerate(prefix[:high])
        ]
        if False in first:  # there the array must end
            first = first[: first.index(False)]
            high = len(first)
        # With xgrammar a tuple ends where its items are named, unless more are asked for.
        rest: Schema = not (self._is_xgrammar and first and low <= len(first))
        if "items" in schema:
            rest = self._schema(schema["items"], f"{at}/items", depth + 1)
        if high is not None and high <= len(first):
            rest = False
        if low > (high if high is not None else low) or (rest is False and low > len(first)):
            return False
        if first:
            out["prefixItems"] = first
        if rest is not True or first:
            out["items"] = rest
        if low:
            out["minItems"] = low
        if high is not None and not (first and rest is False):
            out["maxItems"] = high
        return out

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> Schema:
        given = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        required = schema.get("required", [])
        for keyword, value in (("properties", given), ("patternProperties", patterns)):
            if not isinstance(value, dict):
                raise SchemaError(f"{at}/{keyword}", f"{keyword} is an object")
        if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
            raise SchemaError(f"{at}/required", "required is a list of names")
        if max(len(given), len(required)) > MAX_PROPERTIES:
            raise SchemaError(at, f"an object has more than {MAX_PROPERTIES} properties")
        out: dict[str, Any] = {"type": "object"}
        properties = {
            name: self._schema(value, f"{at}/properties/{_escape(name)}", depth + 1)
            for name, value in given.items()
        }
        rest: Schema | None = None
        if "additionalProperties" in schema:
            rest = self._schema(
                schema["additionalProperties"], f"{at}/additionalProperties", depth + 1
            )
        is_open = (rest is not False and (rest is not None or not given)) or bool(patterns)
        for name in dict.fromkeys(required):
            if name not in properties and not patterns:
                properties[name] = True if rest is None else rest
        if any(properties.get(name) is False for name in required):
            return False
        if properties:
            out["properties"] = properties
        if required:
            out["required"] = list(dict.fromkeys(required))
        if rest is not None:
            out["additionalProperties"] = rest
        if patterns:
            out["patternProperties"] = self._pattern_properties(schema, patterns, rest, at, depth)
        if "propertyNames" in schema:
            self._property_names(schema, out, rest, at, depth)
        self._property_counts(schema, out, is_open, at)
        if self._is_xgrammar:
            out["properties"] = {k: v for k, v in properties.items() if v is not False}
            if not out["properties"]:
                del out["properties"]
            if False in properties.values() and rest not in (None, False):
                raise self._no(f"{at}/properties", "a property that must be absent")
        return out

    def _pattern_properties(
        self,
        schema: Mapping[str, Any],
        patterns: Mapping[str, Any],
        rest: Schema | None,
        at: str,
        depth: int,
    ) -> dict[str, Schema]:
        at = f"{at}/patternProperties"
        if self._is_xgrammar and (
            len(patterns) > 1
            or rest not in (None, False)
            or schema.get("properties")
            or schema.get("required")
        ):
            raise self._no(at, "'patternProperties' beside other properties")
        return {
            self._pattern(name, f"{at}/{_escape(name)}"): self._schema(
                value, f"{at}/{_escape(name)}", depth + 1
            )
            for name, value in patterns.items()
        }

    def _property_names(
        self,
        schema: Mapping[str, Any],
        out: dict[str, Any],
        rest: Schema | None,
        at: str,
        depth: int,
    ) -> None:
        """Names by a pattern, as `patternProperties` and nothing else."""
        names = self._schema(schema["propertyNames"], f"{at}/propertyNames", depth + 1)
        if names is True:
            return
        keys = set(names) - {"type"} if isinstance(names, dict) else set()
        others = [k for k in ("properties", "patternProperties", "required") if schema.get(k)]
        if others or keys not in ({"pattern"}, {"enum"}) or rest is False:
            raise self._no(f"{at}/propertyNames", "'propertyNames' of this form")
        assert isinstance(names, dict)
        pattern = names.get("pattern")
        if pattern is None:
            texts = [v for v in names["enum"] if isinstance(v, str)]
            node = regex.Alt(tuple(regex.literal(text) for text in texts))
            plain = regex.without(node, _ESCAPED) if self._is_xgrammar else node
            if plain is None:
                raise self._no(f"{at}/propertyNames", "names with escaped characters")
            pattern = f"^(?:{regex.write(plain)})$"
        out["patternProperties"] = {pattern: True if rest is None else rest}
        out["additionalProperties"] = False

    def _property_counts(
        self, schema: Mapping[str, Any], out: dict[str, Any], is_open: bool, at: str
    ) -> None:
        low, high = self._counts(schema, "minProperties", "maxProperties", at)
        num_required = len(out.get("required", ()))
        if low > num_required:
            # A grammar counts a name that comes twice as two, a reader of JSON as one.
            if is_open and low > 1:
                raise self._no(f"{at}/minProperties", "'minProperties' with names left open")
            out["minProperties"] = low
        if high is not None:
            out["maxProperties"] = high
        num_counted = len(out.get("properties", ())) * max(out.get("minProperties", 0), high or 0)
        if num_counted > MAX_COUNTED:
            keyword = "minProperties" if "minProperties" in out else "maxProperties"
            raise SchemaError(f"{at}/{keyword}", "too many properties to count")
        is_counted = "minProperties" in out or "maxProperties" in out
        if is_counted and not self._is_xgrammar and num_required < len(out.get("properties", ())):
            keyword = "minProperties" if "minProperties" in out else "maxProperties"
            raise self._no(f"{at}/{keyword}", f"{keyword!r} with optional properties")

    def _counts(
        self, schema: Mapping[str, Any], low: str, high: str, at: str
    ) -> tuple[int, int | None]:
        found: list[int | None] = []
        for keyword in (low, high):
            value = schema.get(keyword)
            if value is not None:
                if not _is_number(value) or value < 0 or value != int(value):
                    raise SchemaError(f"{at}/{keyword}", f"{keyword} is a count")
                value = int(value)
                if value > 2**31:
                    raise self._no(f"{at}/{keyword}", "a count above 2^31")
            found.append(value)
        return found[0] or 0, found[1]


def _intersection(parts: list[Schema]) -> Schema:
    """What satisfies all of these, in one schema where their keywords do not collide."""
    if False in parts:
        return False
    merged: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            if merged.keys() & part.keys():
                return {"allOf": [p for p in parts if p is not True]}
            merged |= part
    return merged or True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_of(value: Any, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return _is_number(value) and value == int(value)
    return _is_number(value)


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON: 1 is 1.0, but true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        _is_number(one) and _is_number(other) and one == other
    )


def _numbers(values: Any) -> Iterator[float]:
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _round_bounds(out: dict[str, Any]) -> None:
    """Bounds of an integer, as integers."""
    if "minimum" in out:
        out["minimum"] = math.ceil(out["minimum"])
    if "maximum" in out:
        out["maximum"] = math.floor(out["maximum"])
    if "exclusiveMinimum" in out:
        out["exclusiveMinimum"] = math.floor(out["exclusiveMinimum"])
    if "exclusiveMaximum" in out:
        out["exclusiveMaximum"] = math.ceil(out["exclusiveMaximum"])
    step = out.get("multipleOf")
    if step is not None and step == int(step):
        out["multipleOf"] = int(step)


def _is_empty_range(out: Mapping[str, Any]) -> bool:
    low = max(out.get("minimum", -math.inf), out.get("exclusiveMinimum", -math.inf))
    high = min(out.get("maximum", math.inf), out.get("exclusiveMaximum", math.inf))
    is_exclusive = low == out.get("exclusiveMinimum") or high == out.get("exclusiveMaximum")
    return low > high or (low == high and is_exclusive)


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema can have, None where it is not said."""
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list):
            return None
        return {t for v in values for t in TYPES if t != "integer" and _is_of(v, t)}
    given = schema.get("type")
    names: list[Any] = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) for name in names):
        return None
    return {"number" if name == "integer" else name for name in names}


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    kinds = _kinds(one), _kinds(other)
    if None not in kinds and not kinds[0] & kinds[1]:  # type: ignore[operator]
        return True
    if kinds[0] == kinds[1] == {"object"}:
        tags = _tags(one), _tags(other)
        return any(not tags[0][k] & tags[1][k] for k in tags[0].keys() & tags[1].keys())
    values = _values_of(one), _values_of(other)
    return None not in values and not values[0] & values[1]  # type: ignore[operator]


def _values_of(schema: Any) -> set[str] | None:
    if not isinstance(schema, dict) or not ("const" in schema or "enum" in schema):
        return None
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        return None
    # A number is written in one way here, so that 1 and 1.0 are one value.
    return {json.dumps(float(v) if _is_number(v) else v, sort_keys=True) for v in values}


def _tags(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Required properties with few values, by which an object can be told from others."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {k: _values_of(properties.get(k)) for k in required if isinstance(k, str)}
    return {k: v for k, v in found.items() if v is not None}


def _walk(schema: Any, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    stack = [(pointer, schema)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, dict):
            yield at, node
            stack.extend((f"{at}/{_escape(str(k))}", v) for k, v in node.items())
        elif isinstance(node, list):
            stack.extend((f"{at}/{i}", v) for i, v in enumerate(node))


def _direct_refs(schema: Schema) -> Iterator[str]:
    """Names of $defs that a schema refers to at its own place in the instance."""
    stack: list[Schema] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"].removeprefix("#/$defs/")
            for keyword in ("anyOf", "oneOf", "allOf"):
                stack.extend(node.get(keyword, ()))


def _find_cycle(defs: Mapping[str, Schema]) -> str | None:
    """A definition that refers to itself without anything between."""
    edges = {name: set(_direct_refs(schema)) for name, schema in defs.items()}
    while True:
        leaves = {name for name, refs in edges.items() if not refs & edges.keys()}
        if not leaves:
            return next(iter(edges), None)
        edges = {name: refs for name, refs in edges.items() if name not in leaves}


def _finite_defs(defs: Mapping[str, Schema]) -> set[str]:
    """The definitions that something finite satisfies: the least fixed point."""
    finite: set[str] = set()
    while True:
        new = {n for n, s in defs.items() if n not in finite and _is_finite(s, finite)}
        if not new:
            return finite
        finite |= new


def _is_finite(schema: Schema, finite: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_is_finite(s, finite) for s in schema[keyword]):
            return False
    if not all(_is_finite(s, finite) for s in schema.get("allOf", ())):
        return False
    properties = schema.get("properties", {})
    if not all(_is_finite(properties.get(k, True), finite) for k in schema.get("required", ())):
        return False
    needed = schema.get("minItems", 0)
    first = schema.get("prefixItems", [])
    if not all(_is_finite(s, finite) for s in first[:needed]):
        return False
    return needed <= len(first) or _is_finite(schema.get("items", True), finite)

"""JSON schemas of all kinds: name to schema. In REFUSED are those that must be answered 400."""

INT = {"type": "integer"}
TEXT = {"type": "string", "maxLength": 6}


def obj(properties, *required, **more):
    """An object schema; all properties are required unless some are named."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        **more,
    }


TREE = {
    "$defs": {
        "node": obj(
            {"value": INT, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            additionalProperties=False,
        )
    },
    "$ref": "#/$defs/node",
}
MUTUAL = {
    "$defs": {
        "expr": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/sum"}]},
        "sum": obj(
            {
                "op": {"enum": ["+", "-"]},
                "of": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/expr"},
                    "minItems": 1,
                    "maxItems": 2,
                },
            },
            additionalProperties=False,
        ),
    },
    "$ref": "#/$defs/expr",
}
TAGGED = {
    "oneOf": [
        obj({"kind": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}}),
        obj({"kind": {"const": "dog"}, "name": TEXT}),
        obj({"kind": {"enum": ["fish", "bird"]}}),
    ]
}
DEEP = INT
for _ in range(20):
    DEEP = obj({"next": DEEP})

ACCEPTED = {
    # types
    "empty": {},
    "true": True,
    "object": {"type": "object"},
    "array": {"type": "array"},
    "string": {"type": "string"},
    "integer": INT,
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "type list": {"type": ["string", "integer", "null"], "minLength": 2, "minimum": 5},
    "nullable object": {**obj({"a": INT}), "type": ["object", "null"]},
    # enum and const
    "enum": {"enum": ["a", 1, None, {"x": [1, 2]}, 1.5, 'é"\\\n']},
    "enum with type": {"type": "string", "enum": ["a", 1]},
    "enum beside minLength": {"enum": ["a", "abc"], "minLength": 2},
    "const object": {"const": {"a": [1, {"b": None}]}},
    "large enum": {"enum": [f"value number {i}" for i in range(2000)]},
    # strings
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    "pattern inside": {"type": "string", "pattern": "ab+c", "maxLength": 9},
    "pattern at start": {"type": "string", "pattern": "^id-[0-9]+"},
    "pattern alternatives": {"type": "string", "pattern": "^(cat|dog)s?$|^none$"},
    "pattern beside length": {
        "type": "string",
        "pattern": "^[a-c]+$",
        "minLength": 3,
        "maxLength": 4,
    },
    "pattern classes": {"type": "string", "pattern": "^\\d{3}-\\w\\s\\S\\D\\W$"},
    "pattern escapes": {"type": "string", "pattern": '^[\\\\"\\n/]{2,3}$'},
    "pattern of controls": {"type": "string", "pattern": "^[\\x00-\\x1f]{1,3}$"},
    "pattern unicode": {"type": "string", "pattern": "^[\\u4e00-\\u9fff]{1,4}é?$"},
    "pattern dot": {"type": "string", "pattern": "^.{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "hostname": {"type": "string", "format": "hostname"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    "format beside pattern": {"type": "string", "format": "date", "pattern": "^2"},
    "json-pointer": {"type": "string", "format": "json-pointer"},
    # numbers
    "integer range": {"type": "integer", "minimum": -7, "maximum": 123},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "integer with broken bounds": {"type": "integer", "minimum": 0.5, "maximum": 3.7},
    "number range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "number exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number from": {"type": "number", "minimum": 3},
    "number to": {"type": "number", "maximum": -3},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf in range": {"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 50},
    "multipleOf quarter": {"type": "number", "multipleOf": 0.25},
    # arrays
    "items": {"type": "array", "items": INT, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [INT, TEXT]},
    "tuple with rest": {
        "type": "array",
        "prefixItems": [INT],
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 3,
    },
    "closed tuple": {"type": "array", "prefixItems": [INT, TEXT], "items": False, "minItems": 2},
    "cut tuple": {"type": "array", "prefixItems": [INT, TEXT], "maxItems": 1},
    "items false": {"type": "array", "items": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [INT], "unevaluatedItems": TEXT},
    "uniqueItems of one": {"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1},
    "matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "array", "items": INT, "minItems": 2, "maxItems": 2},
    },
    # objects
    "optional properties": obj({"a": INT, "b": TEXT, "c": {"type": "null"}}, "b"),
    "required but not listed": obj({"a": INT}, "z"),
    "required only": {"type": "object", "required": ["z", "y"]},
    "additionalProperties false": obj({"a": INT}, additionalProperties=False),
    "additionalProperties true": obj({"a": INT}, additionalProperties=True),
    "additionalProperties schema": obj({"a": INT}, additionalProperties={"type": "boolean"}),
    "map": {"type": "object", "additionalProperties": INT},
    "unevaluatedProperties": {**obj({"a": INT}), "unevaluatedProperties": False},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": INT},
        "additionalProperties": False,
    },
    "patternProperties beside properties": {
        "type": "object",
        "properties": {"x1": TEXT},
        "patternProperties": {"^x[0-9]$": TEXT},
        "additionalProperties": False,
    },
    "patternProperties with rest": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": INT},
        "additionalProperties": {"type": "boolean"},
    },
    "propertyNames pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$"},
        "additionalProperties": INT,
    },
    "propertyNames enum": {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    "minProperties closed": {
        "type": "object",
        "properties": {"a": INT, "b": INT, "c": INT},
        "minProperties": 2,
        "maxProperties": 2,
        "additionalProperties": False,
    },
    "minProperties open": {"type": "object", "additionalProperties": INT, "minProperties": 1},
    "maxProperties": {"type": "object", "additionalProperties": INT, "maxProperties": 2},
    "unicode names": obj({"键": INT, 'é"\\': TEXT, "a\nb": INT, "": INT}),
    "forbidden property": {"type": "object", "properties": {"a": False, "b": INT}},
    # unions and references
    "anyOf": {"anyOf": [INT, TEXT, {"type": "null"}]},
    "anyOf beside properties": {
        **obj({"k": INT}),
        "anyOf": [obj({"a": INT}), obj({"b": TEXT})],
    },
    "anyOf beside type": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]},
    "oneOf by type": {"oneOf": [INT, TEXT]},
    "oneOf by tag": TAGGED,
    "allOf of one": {"allOf": [INT]},
    "allOf of bounds": {"allOf": [INT, {"minimum": 3}, {"maximum": 5}]},
    "allOf of objects": {"allOf": [obj({"a": INT}), obj({"b": TEXT})]},
    "ref": {"$defs": {"i": INT}, "$ref": "#/$defs/i"},
    "ref beside bounds": {"$defs": {"i": INT}, "$ref": "#/$defs/i", "minimum": 5},
    "ref to a property": obj({"a": INT, "b": {"$ref": "#/properties/a"}}),
    "ref with escapes": {"$defs": {"a/b~c d": INT}, "$ref": "#/$defs/a~1b~0c%20d"},
    "ref to an anchor": {"$defs": {"i": {"$anchor": "foo", **INT}}, "$ref": "#foo"},
    "definitions": {
        "definitions": {"i": INT},
        "type": "array",
        "items": {"$ref": "#/definitions/i"},
    },
    "tree": TREE,
    "mutual recursion": MUTUAL,
    "recursive root": obj({"v": INT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    # what asserts nothing
    "annotations": {
        **INT,
        "title": "t",
        "description": "d",
        "examples": [1],
        "default": 3,
        "x-foo": 1,
        "$comment": "c",
        "deprecated": True,
        "readOnly": True,
        "nullable": True,
    },
    "contentEncoding": {"type": "string", "contentEncoding": "base64", "maxLength": 8},
    "then without if": {**INT, "then": {"minimum": 3}},
    # whole documents
    "deep": DEEP,
    "pydantic": {
        "$defs": {
            "Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"},
            "Part": obj(
                {
                    "name": {"title": "Name", "type": "string", "maxLength": 8},
                    "price": {
                        "anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}],
                        "default": None,
                    },
                },
                "name",
            ),
        },
        **obj(
            {
                "colour": {"$ref": "#/$defs/Colour"},
                "parts": {"items": {"$ref": "#/$defs/Part"}, "type": "array", "maxItems": 2},
                "labels": {"additionalProperties": {"type": "string"}, "type": "object"},
            },
            "colour",
            "parts",
            title="Thing",
        ),
    },
    "invoice": obj(
        {
            "id": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "date": {"type": "string", "format": "date"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": obj(
                    {"sku": TEXT, "n": {"type": "integer", "minimum": 1}},
                    additionalProperties=False,
                ),
            },
            "paid": {"type": ["boolean", "null"]},
        },
        additionalProperties=False,
    ),
}

# Name to the schema and the JSON pointer that the answer names.
REFUSED = {
    "not": ({"not": {"type": "string"}}, "/not"),
    "if": (obj({"a": {"if": {}, "then": {}}}), "/properties/a/if"),
    "contains": ({"type": "array", "contains": INT}, "/contains"),
    "uniqueItems": ({"type": "array", "items": INT, "uniqueItems": True}, "/uniqueItems"),
    "dependentRequired": (
        {**obj({"a": INT}), "dependentRequired": {"a": ["b"]}},
        "/dependentRequired",
    ),
    "dependentSchemas": (
        {**obj({"a": INT}), "dependentSchemas": {"a": {}}},
        "/dependentSchemas",
    ),
    "unevaluated beside anyOf": (
        {"anyOf": [obj({"a": INT})], "unevaluatedProperties": False},
        "/unevaluatedProperties",
    ),
    "items list": ({"type": "array", "items": [INT]}, "/items"),
    "dynamicRef": ({"$dynamicRef": "#a"}, "/$dynamicRef"),
    "remote ref": ({"$ref": "https://example.org/s.json"}, "/$ref"),
    "dangling ref": ({"$ref": "#/$defs/nothing"}, "/$ref"),
    "cyclic ref": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "/$defs/a"),
    "cycle through anyOf": (
        {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, INT]}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
        "/$defs/",
    ),
    "infinite": (
        {"$defs": {"a": obj({"a": {"$ref": "#/$defs/a"}})}, "$ref": "#/$defs/a"},
        "/",
    ),
    "unknown type": (obj({"a": {"type": "strnig"}}), "/properties/a/type"),
    "unknown format": ({"type": "string", "format": "phone"}, "/format"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, "/pattern"),
    "back-reference": ({"type": "string", "pattern": "^(a)\\1$"}, "/pattern"),
    "broken pattern": ({"type": "string", "pattern": "([" + "x" * 50}, "/pattern"),
    "overlapping oneOf": ({"oneOf": [INT, {"type": "number"}]}, "/oneOf"),
    "huge number": ({"type": "integer", "minimum": 10**20}, "/minimum"),
    "const of another type": ({"type": "string", "const": 1}, "/const"),
    "minProperties open": (
        {"type": "object", "additionalProperties": INT, "minProperties": 2},
        "/minProperties",
    ),
    "false": (False, "/"),
    "no schema": ({"type": "object", "properties": {"a": 3}}, "/properties/a"),
}

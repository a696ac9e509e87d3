"""Schemas of all kinds that a grammar must keep to; small enough that a random model comes to an end."""

from typing import Any

Schema = dict[str, Any]


def obj(properties: dict[str, Any], optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """A closed object whose properties are required, unless they are optional."""
    required = [name for name in properties if name not in optional]
    base = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {**base, **more}


TEXT = {"type": "string", "maxLength": 8}
INT = {"type": "integer", "minimum": -99, "maximum": 99}
TREE = obj({"value": INT, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}})
LIST = {"anyOf": [{"type": "null"}, obj({"head": INT, "tail": {"$ref": "#/$defs/list"}})]}
EXPRESSION = {"anyOf": [INT, obj({"op": {"enum": ["+", "*"]}, "left": {"$ref": "#/$defs/e"}, "right": INT})]}

SCHEMAS: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "integer-range": {"type": "integer", "minimum": 3, "maximum": 12},
    "integer-negative": {"type": "integer", "minimum": -123, "maximum": -7},
    "integer-large": {"type": "integer", "minimum": 10**18},
    "integer-multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "number-range": {"type": "number", "minimum": 0.5, "maximum": 1.75},
    "number-exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "string": TEXT,
    "string-length": {"type": "string", "minLength": 3, "maxLength": 6},
    "string-pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "string-pattern-unanchored": {"type": "string", "pattern": "ab+c", "maxLength": 12},
    "string-unicode-pattern": {"type": "string", "pattern": "^[äöü開心]{1,4}$"},
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "enum-unicode": {"enum": ["开心", "naïve", "😀", 'quo"te\\', "line\nbreak"]},
    "const": {"const": {"kind": "fixed", "list": [1, "two", None]}},
    "type-list": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array": {"type": "array", "items": INT, "maxItems": 4},
    "array-bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "array-of-arrays": {
        "type": "array",
        "items": {"type": "array", "items": INT, "minItems": 1, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [INT, TEXT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "object": obj({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "object-optional": obj({"a": INT, "b": INT, "c": {"type": "boolean"}}, optional=("b", "c")),
    "object-empty": obj({}),
    "object-unicode": obj({"心情": {"enum": ["开心", "难过"]}, "größe": INT}),
    "object-open": {
        "type": "object",
        "properties": {"id": INT},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "pattern-properties": {
        "type": "object",
        "patternProperties": {"^[xy][0-9]$": INT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "nested": obj({"a": obj({"b": obj({"c": obj({"d": INT})})})}),
    "any-of": {"anyOf": [INT, {"const": "none"}, obj({"x": INT})]},
    "any-of-nested": obj({"value": {"anyOf": [TEXT, {"type": "array", "items": INT, "maxItems": 2}]}}),
    "one-of-disjoint": {
        "oneOf": [obj({"kind": {"const": "a"}, "n": INT}), obj({"kind": {"const": "b"}, "s": TEXT})]
    },
    "all-of": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "all-of-objects": {
        "allOf": [
            {"type": "object", "properties": {"a": INT}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "ref": {"$ref": "#/$defs/point", "$defs": {"point": obj({"x": INT, "y": INT})}},
    "ref-definitions": {
        "type": "array",
        "items": {"$ref": "#/definitions/color"},
        "minItems": 1,
        "maxItems": 3,
        "definitions": {"color": {"enum": ["r", "g", "b"]}},
    },
    "ref-recursive-tree": {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    "ref-recursive-list": {"$ref": "#/$defs/list", "$defs": {"list": LIST}},
    "ref-recursive-expression": {"$ref": "#/$defs/e", "$defs": {"e": EXPRESSION}},
    "annotations": obj(
        {"x": {**INT, "description": "a number", "default": 3, "examples": [1, 2], "title": "X"}},
        title="Annotated",
    ),
}
assert len(SCHEMAS) >= 40

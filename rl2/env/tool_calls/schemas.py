"""What the schemas of the tools say about arguments that are written without quotes."""

from collections.abc import Sequence
from typing import Any

from rl2.env.tool_calls.call import DECODER

Schemas = dict[str, dict[str, Any]]  # of the arguments by their names, by the name of the tool


def argument_schemas(tools: Sequence[dict]) -> Schemas:
    """Returns the schemas of arguments by the names of tools and arguments.

    Malformed ones are left out.
    """
    schemas: Schemas = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schemas[function["name"]] = properties if isinstance(properties, dict) else {}
    return schemas


def to_typed(text: str, types: set[str]) -> Any:
    """Returns the value of an argument that is written without quotes: a text, or JSON.

    "5" is a number where the schema says so, a text where it says that, and a number where the
    schema says nothing. Python's True, False and None are read too.
    """
    if types == {"string"}:
        return text
    plain = text.strip()
    lowered = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    try:
        value = DECODER.decode(lowered)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):  # texts are written without quotes, so these are its own
        return text
    return value if not types or _json_types(value) & types else text


def declared_types(schema: Any) -> set[str]:
    """Returns the types that a schema of JSON allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {*(declared or [])}
    for choice in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        types |= declared_types(choice)
    return types | {"null"} if schema.get("nullable") else types


def _json_types(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", *(["integer"] if value.is_integer() else [])}
    return {"array" if isinstance(value, list) else "object"}

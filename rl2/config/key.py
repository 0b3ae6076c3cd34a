"""How the schema declares a key: its default, help, range, choices and condition in one place."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from rl2.algorithms.find import Choices

# Types with a range, which is that of the key: attributes of Key.
PositiveInt = Annotated[int, ("above", 0)]
PositiveFloat = Annotated[float, ("above", 0)]
NonNegativeInt = Annotated[int, ("at_least", 0)]
NonNegativeFloat = Annotated[float, ("at_least", 0)]
Ratio = Annotated[float, ("at_least", 0), ("at_most", 1)]


@dataclass(frozen=True)
class Condition:
    """When a key has an effect: `holds(config, section)`, where `section` is the key's section.

    `reason` completes "KEY=VALUE has no effect ..." for when it does not hold. It may refer to
    {config}, {section} and {path}, the section's name.
    """

    holds: Callable[[Any, Any], object]
    reason: str
    # Where it does not hold, the key is refused, since the user believes that it does something to
    # the algorithm. A harmless one warns.
    is_harmless: bool = False


@dataclass(frozen=True)
class Key:
    """What the schema says about a key or a section. None and the default are always allowed."""

    help: str  # its first clause is the short help
    common: bool = False  # whether the short help lists it
    above: float | None = None  # the value is greater than this
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None  # the value is less than this
    may_be_infinite: bool = False  # inf switches a bound off; NaN is never allowed
    # Values beyond these warn, with what they do.
    unusual_above: float | None = None
    unusual_below: float | None = None
    unusual_effect: str = ""
    choices: Collection[str] = ()  # of a text; a key that may also be a number takes any number
    functions: Choices[Any] | None = None  # the choices are its built-in ones and the user's own
    only_if: Condition | None = None
    # A key of the same section that names a function. This key is a setting of that function and
    # has an effect only if the function declares that it reads it.
    setting_of: str | None = None
    default_of: str | None = None  # another setting that has the value of this key unless it is set
    identity: bool = False  # a run with another value is another experiment: it does not resume
    is_section: bool = False
    types: tuple[Any, ...] = ()  # by default those of the field's annotation


def key(default: Any, help: str, **properties: Any) -> Any:
    """A field that is a key. `properties` are the other attributes of Key."""
    metadata = {"key": Key(help, **properties)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, help: str, common: bool = True, **properties: Any) -> Any:
    """A field that is a section. Without `common` the short help lists none of its keys."""
    info = Key(help, common=common, is_section=True, **properties)
    return field(default_factory=kind, metadata={"key": info})


_known_keys: dict[Any, dict[str, Key]] = {}  # by config class: checks ask for them often


def schema_keys(root: type) -> dict[str, Key]:
    """Dotted name -> Key, of every section and key of a config class, in order."""
    if root not in _known_keys:
        _known_keys[root] = dict(_walk(root, ""))
    return _known_keys[root]


def _walk(kind: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    hints = get_type_hints(kind)  # without ranges
    for entry in fields(kind):
        name = prefix + entry.name
        declared = _declaration(kind, entry.name)
        range_of_type: dict[str, Any] = {}
        for part in (declared.type, *get_args(declared.type)):
            range_of_type |= getattr(part, "__metadata__", ())
        info: Key = declared.metadata["key"]
        hint = hints[entry.name]
        types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        yield name, replace(info, types=info.types or types, **range_of_type)
        if is_dataclass(entry.default_factory):
            yield from _walk(entry.default_factory, name + ".")


def _declaration(kind: Any, name: str) -> "Field[Any]":
    """The field in the nearest class that declares it with `key` or `section`."""
    for parent in kind.__mro__[:-1]:
        declared: Field[Any] = parent.__dataclass_fields__[name]
        if "key" in declared.metadata:
            return declared
    raise TypeError(f"{kind.__name__}.{name} is declared without key(default, help)")

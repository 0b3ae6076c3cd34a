"""How the schema declares a key: its default, help, range and choices, in the field's metadata."""

import math
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin

# Types that say the bounds of their key.
PositiveInt = Annotated[int, ("above", 0)]
PositiveFloat = Annotated[float, ("above", 0)]
NonNegativeInt = Annotated[int, ("at_least", 0)]
NonNegativeFloat = Annotated[float, ("at_least", 0)]
Ratio = Annotated[float, ("at_least", 0), ("at_most", 1)]
Penalty = Annotated[float, ("at_least", -2), ("at_most", 2)]


@dataclass(frozen=True)
class Key:
    """What the schema says about a key or a section. None and the default are always allowed."""

    help: str  # its first clause is the short help
    # The numbers that it may have, also as an item of a list or map. NaN is never among them.
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    may_be_infinite: bool = False  # inf switches a bound off
    may_be_switch: bool = False  # also true or false
    may_be_empty: bool = False  # "" is a value, and no unset variable of the shell
    choices: Collection[str] = ()  # of a text; a key that may also be a number takes any number
    functions: tuple[str, ...] = ()  # the built-in ones; the user may also name FILE.py:FUNCTION
    is_section: bool = False
    default: Any = None  # of the field

    @property
    def leader(self) -> str:
        """The key whose value this one has unless it is set; "" if there is none."""
        is_reference = isinstance(self.default, str) and self.default.startswith("${")
        return self.default[2:-1] if is_reference else ""

    def broken_bounds(self, value: Any) -> Iterator[str]:
        """The bounds that the value breaks, in words that follow "it must".

        Every item of a list or a map has to be within them. A word that a number may be has none.
        """
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from self.broken_bounds(item)
            return
        if isinstance(value, str):
            if not value:
                yield "have no empty text"
            return
        if value is None:  # an engine's argument may be null
            return
        if math.isnan(value):
            yield "be a number"
            return
        if math.isinf(value) and not self.may_be_infinite:
            yield "be finite"
        if self.above is not None and value <= self.above:
            yield f"be above {self.above}"
        if self.at_least is not None and value < self.at_least:
            yield f"not be below {self.at_least}"
        if self.at_most is not None and value > self.at_most:
            yield f"not be above {self.at_most}"
        if self.below is not None and value >= self.below:
            yield f"be below {self.below}"


def key(default: Any, help: str, **properties: Any) -> Any:
    """A field that is a key. `properties` are the other attributes of Key.

    Its bounds are in addition to those of the field's type.
    """
    metadata = {"key": Key(help, **properties)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, help: str) -> Any:
    """A field that is a section."""
    return field(default_factory=kind, metadata={"key": Key(help, is_section=True)})


def follows(name: str) -> Any:
    """The default of a key that has the value of another one unless it is set."""
    return f"${{{name}}}"


_known_keys: dict[type, dict[str, Key]] = {}  # by config class: checks ask for them often


def schema_keys(root: type) -> dict[str, Key]:
    """Dotted name -> Key, of every section and key of a config class, in order."""
    if root not in _known_keys:
        _known_keys[root] = dict(_walk(root, ""))
    return _known_keys[root]


def _walk(kind: Any, prefix: str) -> Iterator[tuple[str, Key]]:
    """The sections and keys of a config class, and of the sections in it."""
    # A subclass that only changes the default declares a field without `key` or `section`.
    declared: dict[str, Field[object]] = {}
    for parent in reversed(kind.__mro__[:-1]):
        declared |= {entry.name: entry for entry in fields(parent) if "key" in entry.metadata}
    for entry in fields(kind):
        name, make = f"{prefix}{entry.name}", entry.default_factory
        info: Key = declared[entry.name].metadata["key"]
        bounds = _bounds_of_type(declared[entry.name].type)
        wider = {bound: value for bound, value in bounds.items() if getattr(info, bound) is None}
        default = entry.default if make is MISSING else make()
        is_switch = bool in get_args(declared[entry.name].type)
        yield name, replace(info, default=default, may_be_switch=is_switch, **wider)
        if is_dataclass(make):
            yield from _walk(make, f"{name}.")


def _bounds_of_type(annotation: object) -> dict[str, Any]:
    """The bounds in an annotation such as PositiveInt, PositiveInt | None or list[PositiveInt]."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Annotated:
            return dict(part.__metadata__)
    return {}

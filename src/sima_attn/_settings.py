"""Settings as frozen dataclasses: limits of their fields, overrides (`--set a.b=c`), dictionaries, differences.

A field declares its limit in its type:

    epochs: PositiveInt
    clip: PositiveFloat | None = None
    scale: Range[Share] = (0.08, 1.0)

`check` holds every value to its limit. Relations between fields belong to a method `check_relations` of the dataclass.
"""

import contextlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeVar, Union

from sima_attn._errors import unknown_name

T = TypeVar("T")


class Limit(NamedTuple):
    """The values that a field may have, in words and as a test."""

    words: str
    allows: Callable[[Any], bool]


def at_least(least: float) -> Limit:
    """Finite numbers from `least` on."""
    return Limit(f"at least {least}", lambda value: least <= value < math.inf)


def between(low: float, high: float) -> Limit:
    """Numbers from `low` to `high`, both included."""
    return Limit(f"between {low} and {high}", lambda value: low <= value <= high)


def one_of(*names: str) -> Limit:
    """One of these strings."""
    return Limit(f"one of {', '.join(names)}", names.__contains__)


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, Limit("above 0", lambda value: 0 < value < math.inf)]
NonNegativeFloat = Annotated[float, at_least(0)]
Probability = Annotated[float, between(0, 1)]
Share = Annotated[float, Limit("above 0 and at most 1", lambda value: 0 < value <= 1)]
Decay = Annotated[float, Limit("at least 0 and below 1", lambda value: 0 <= value < 1)]
Range = Annotated[tuple[T, T], Limit("two numbers, the lower one first", lambda pair: pair[0] <= pair[1])]


def check(settings: Any) -> None:
    """Raise for the first value outside the limit of its field, e.g. `optim.lr must be above 0, got -1.0`."""
    check_value(settings, type(settings), "")


def check_value(value: Any, kind: Any, where: str, or_none: str = "") -> None:
    """Raise unless `value` is within the limits that a type declares, at any depth; `where` names it in the message."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        for name, inner in typing.get_type_hints(kind, include_extras=True).items():
            check_value(getattr(value, name), inner, f"{where}.{name}" if where else name)
        if hasattr(value, "check_relations"):
            value.check_relations()
    elif origin in (Union, types.UnionType):
        if value is not None:
            check_value(value, arguments[0], where, " or none")
    elif origin is tuple:
        for index, (item, inner) in enumerate(zip(value, arguments, strict=True)):
            check_value(item, inner, f"{where}[{index}]")
    elif origin is Annotated:
        kind, limit = arguments
        if not limit.allows(value):
            raise ValueError(f"{where} must be {limit.words}{or_none}, got {value!r}")
        check_value(value, kind, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, got {value}")


def with_overrides(recipe: T, overrides: Sequence[str]) -> T:
    """The recipe with overrides `a.b=c` applied, each parsed as the type of its field."""
    for text in overrides:
        where, equals, value = text.partition("=")
        if not equals or not where.strip():
            raise ValueError(f"--set needs name=value, e.g. --set schedule.epochs=10, got {text!r}")
        recipe = _set(recipe, where.strip().split("."), value.strip(), where.strip(), list(flat(recipe)))
    return recipe


def _set(settings: Any, names: list[str], text: str, where: str, known: list[str]) -> Any:
    first, *rest = names
    kinds = typing.get_type_hints(type(settings))
    if first not in kinds:
        # Suggest the same name in another group before a similar name in this one: run.epochs is schedule.epochs.
        same = [repr(name) for name in known if name.split(".")[-1] == names[-1]]
        if same:
            raise ValueError(f"unknown setting {where!r}; did you mean {' or '.join(same)}?")
        raise unknown_name(f"setting {where!r}:", first, kinds)
    now = getattr(settings, first)
    if is_dataclass(now):
        if not rest:
            raise ValueError(f"{where} is a group of settings: {', '.join(f'{where}.{f.name}' for f in fields(now))}")
        return replace(settings, **{first: _set(now, rest, text, where, known)})
    if isinstance(now, dict):
        if len(rest) != 1:
            raise ValueError(f"{where} needs the name of one argument, e.g. {first}.depth=6")
        return replace(settings, **{first: {**now, rest[0]: _any_value(text, where)}})
    if rest:
        raise ValueError(f"{'.'.join(where.split('.')[: -len(rest)])} is a single value and has no {rest[0]!r}")
    return replace(settings, **{first: parse(text, kinds[first], where)})


def _any_value(text: str, where: str) -> Any:
    import yaml

    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)  # YAML reads 1e-5 as a string
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be a number, a string or a list such as [1, 2], got {text!r}") from error


def parse(text: str, kind: Any, where: str) -> Any:
    """Parse text as a value of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", "null"):
            return None
        kind = next(k for k in arguments if k is not type(None))
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        parts = [part.strip() for part in text.strip("()[]").split(",")]
        if len(parts) != len(arguments):
            raise ValueError(f"{where} must be {len(arguments)} numbers separated by commas, got {text!r}")
        return tuple(parse(part, kind, where) for part, kind in zip(parts, arguments, strict=True))
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{where} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        wanted = {"int": "an integer", "float": "a number"}[kind.__name__]
        raise ValueError(f"{where} must be {wanted}, got {text!r}") from None


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names -> values; tuples become lists, as in YAML and JSON."""
    items = settings.items() if isinstance(settings, Mapping) else asdict(settings).items()
    out: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, Mapping) and (value or prefix == ""):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return out


# Settings that may differ when a run is resumed: none of them changes the weights. Images and the teacher may have been
# moved; the checkpoint has the weights of the teacher, and the number and classes of the images, which are compared.
MAY_CHANGE = {"data.path", "teacher.path", "data.workers", "run.checkpoint_minutes", "run.checkpoint_steps"}
MAY_CHANGE |= {"run.timeout_minutes", "report.speed", "report.photos"}


def differences(old: Any, new: Any) -> list[str]:
    """One line per setting that differs, except `MAY_CHANGE`: `optim.lr: 0.001 -> 0.002`."""
    before, after = flat(old), flat(new)
    names = sorted((before.keys() | after.keys()) - MAY_CHANGE)
    return [
        f"{name}: {before.get(name, '(not set)')} -> {after.get(name, '(not set)')}"
        for name in names
        if before.get(name) != after.get(name) or (name in before) != (name in after)
    ]


def to_dict(recipe: Any) -> dict[str, Any]:
    """Convert to nested dictionaries and lists."""
    return json.loads(json.dumps(asdict(recipe)))  # tuples become lists


def from_dict(kind: type[T], values: Mapping[str, Any]) -> T:
    """Inverse of `to_dict`; raise for a setting that is unknown, missing or of the wrong type."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} must be a group of settings, got {values!r}")
    kinds = typing.get_type_hints(kind)
    unknown = set(values) - set(kinds)
    if unknown:
        raise unknown_name(f"setting of {kind.__name__}", min(map(str, unknown)), kinds)
    required = [f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    missing = [field.name for field in required if field.name not in values]
    if missing:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    filled = {}
    for name, value in values.items():
        if is_dataclass(kinds[name]):
            filled[name] = from_dict(kinds[name], value)
            continue
        filled[name] = tuple(value) if isinstance(value, list) else value
        if not _has_type(filled[name], kinds[name]):
            wanted = getattr(kinds[name], "__name__", str(kinds[name]))
            raise ValueError(f"{kind.__name__}.{name} must be of type {wanted}, got {value!r}")
    return kind(**filled)


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field; an int is a valid float."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_has_type, value, arguments))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, origin or kind)

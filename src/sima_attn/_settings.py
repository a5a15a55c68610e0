"""Settings as frozen dataclasses: read from text (`--set a.b=c`), from plain dictionaries, and compared."""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from typing import Any, TypeVar, Union

from sima_attn._errors import unknown_name

T = TypeVar("T")


def at_least(least: int, numbers: Mapping[str, float]) -> None:
    """Raise unless all are finite and none is below the least."""
    for where, number in numbers.items():
        if not least <= number < math.inf:
            raise ValueError(f"{where} must be at least {least}, got {number}")


def above_zero(numbers: Mapping[str, float]) -> None:
    """Raise unless all are finite and above 0."""
    for where, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{where} must be above 0, got {number}")


def with_overrides(recipe: T, overrides: Sequence[str]) -> T:
    """The recipe with settings `a.b=c` put in, each read as the type of its field."""
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
        # The same name in another group is meant rather than a similar one in this: run.epochs is no run.eval_epochs.
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
        raise ValueError(f"{'.'.join(where.split('.')[: -len(rest)])} is a single value; it has no {rest[0]!r}")
    return replace(settings, **{first: parse(text, kinds[first], where)})


def _any_value(text: str, where: str) -> Any:
    import yaml

    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)  # YAML takes 1e-5 for a word
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be a number, a word or a list such as [1, 2], got {text!r}") from error


def parse(text: str, kind: Any, where: str) -> Any:
    """Text as a value of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", "null"):
            return None
        kind = next(k for k in arguments if k is not type(None))
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        parts = [part.strip() for part in text.strip("()[]").split(",")]
        if len(parts) != len(arguments):
            raise ValueError(f"{where} is {len(arguments)} numbers with commas between them, got {text!r}")
        return tuple(parse(part, kind, where) for part, kind in zip(parts, arguments, strict=True))
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{where} is true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        article = {"int": "a whole number", "float": "a number"}[kind.__name__]
        raise ValueError(f"{where} is {article}, got {text!r}") from None


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names -> values, tuples as lists, as YAML and JSON give them back."""
    items = settings.items() if isinstance(settings, Mapping) else asdict(settings).items()
    out: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, Mapping) and (value or prefix == ""):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return out


# What may differ when a run goes on: nothing here changes the weights.
# Images may be moved; whether they are the same is asked of them, not of their place.
MAY_CHANGE = {"data.path", "data.workers", "run.checkpoint_minutes", "run.checkpoint_steps"}


def differences(old: Any, new: Any) -> list[str]:
    """One line a setting that differs and may not: `optim.lr: 0.001 -> 0.002`."""
    before, after = flat(old), flat(new)
    names = sorted((before.keys() | after.keys()) - MAY_CHANGE)
    return [
        f"{name}: {before.get(name, '(not set)')} -> {after.get(name, '(not set)')}"
        for name in names
        if before.get(name) != after.get(name) or (name in before) != (name in after)
    ]


def to_dict(recipe: Any) -> dict[str, Any]:
    """Nested plain dictionaries and lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(v) for name, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, tuple | list) else value

    return plain(asdict(recipe))


def from_dict(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass that `to_dict` took apart; a setting that is unknown, missing or of another type is an error."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} must be a group of settings, got {values!r}")
    kinds = typing.get_type_hints(kind)
    unknown = set(values) - set(kinds)
    if unknown:
        raise unknown_name(f"setting of {kind.__name__}", min(map(str, unknown)), kinds)
    missing = [field.name for field in fields(kind) if _is_needed(field) and field.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    filled = {}
    for name, value in values.items():
        if is_dataclass(kinds[name]):
            filled[name] = from_dict(kinds[name], value)
            continue
        filled[name] = tuple(value) if isinstance(value, list) else value
        if not _is_of(filled[name], kinds[name]):
            wanted = getattr(kinds[name], "__name__", str(kinds[name]))
            raise ValueError(f"{kind.__name__}.{name} must be of type {wanted}, got {value!r}")
    return kind(**filled)


def _is_needed(setting: Field[Any]) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field; a whole number is a float, too."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_of(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_is_of, value, arguments))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, origin or kind)

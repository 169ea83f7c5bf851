"""Specs from plain dicts: what a person wrote is checked by name before a spec looks at its values."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from raypipe.errors import ConfigError, suggest

Spec = TypeVar("Spec")


def make_spec(kind: type[Spec], value: Any, name: str) -> Spec:
    """Return `value` as a spec: itself, or made from a dict, whose unknown keys are an error."""
    if isinstance(value, kind):
        return value
    value = make_mapping(value, name, kind.__name__)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise ConfigError(f"{name} has no field {key!r}{suggest(str(key), known)}")
    try:
        return kind(**value)
    except TypeError as error:
        raise ConfigError(f"{name}={dict(value)!r} is not complete: {error}") from error


def make_mapping(value: Any, name: str, kind: str = "OrderSpec") -> Mapping[str, Any]:
    """Return `value` if it is a dict; else it is an error that says what is wanted."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a {kind} or a dict of its fields, got {value!r}")
    return value

"""Strict configuration schemas derived from the core's dataclasses: one place says what an option is called.

Hydra's structured configs want plain mutable classes; ours are frozen and use Literal and Mapping. ``schema`` makes the
plain twin of a dataclass, ``build`` turns a filled config back into the real one, which validates itself.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

_MADE: dict[type, type] = {}


def _plain(hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        return typing.Optional[_plain(next(a for a in args if a is not type(None)))]  # noqa: UP045
    if origin is tuple:
        return list[_plain(args[0])]  # type: ignore[misc]
    if origin in (dict, Mapping):
        return dict[args[0], _plain(args[1])]  # type: ignore[misc]
    return schema(hint) if dataclasses.is_dataclass(hint) else hint


def schema(cls: type) -> type:
    """The plain dataclass with the fields and defaults of ``cls`` (fields without default become required, "???")."""
    if cls not in _MADE:
        fields = []
        for f in dataclasses.fields(cls):
            hint = _plain(get_type_hints(cls)[f.name])
            if dataclasses.is_dataclass(hint):
                default = dataclasses.field(default_factory=hint)
            elif f.default_factory is not dataclasses.MISSING:
                default = dataclasses.field(default_factory=f.default_factory)
            elif f.default is dataclasses.MISSING:
                default = dataclasses.field(default="???")
            elif isinstance(f.default, tuple):
                value = list(f.default)
                default = dataclasses.field(default_factory=lambda value=value: list(value))
            else:
                default = dataclasses.field(default=f.default)
            fields.append((f.name, hint, default))
        _MADE[cls] = dataclasses.make_dataclass(cls.__name__, fields)
    return _MADE[cls]


def build(cls: type, config: Any) -> Any:
    """The real ``cls`` from a config node of its schema."""
    values = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    return _build(cls, values)


def _build(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        return _build(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return tuple(_build(args[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{k: _build(hints[k], v) for k, v in value.items()})  # type: ignore[operator]
    return value

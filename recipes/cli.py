"""The command line of every recipe: Hydra, with unknown keys answered by the close match and errors in one line."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Hubs are asked for only what a config names; a folder that does not exist must not become a network request.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from core.errors import UserError

CONF = Path(__file__).parent / "conf"


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        name = f"{prefix}{key}"
        yield name
        child = None if OmegaConf.is_missing(node, key) else node[key]
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{name}.")


def _groups() -> dict[str, list[str]]:
    return {d.name: sorted(p.stem for p in d.glob("*.yaml")) for d in CONF.iterdir() if d.is_dir()}


def _closest(word: str, known: list[str]) -> str:
    # The last part is what is usually mistyped, or typed without its section.
    ends = {k.rsplit(".", 1)[-1]: k for k in known}
    near = difflib.get_close_matches(word, known, 1, 0.6) or [
        ends[m] for m in difflib.get_close_matches(word.rsplit(".", 1)[-1], list(ends), 1, 0.6)
    ]
    return f"; did you mean '{near[0]}'?" if near else "; --help lists the keys"


def check_overrides(config_name: str, arguments: list[str]) -> None:
    """Raise UserError for a key or a group choice that does not exist, naming the close match."""
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    groups = _groups()
    with initialize_config_dir(str(CONF), version_base=None):
        known = list(_keys(compose(config_name)))
    free = ("reward.options.", "algorithm.advantage.weights.", "hydra.", "hydra/")  # maps with keys of the user's
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        value = override.value()
        if key in groups:
            if isinstance(value, str) and value not in groups[key]:
                raise UserError(f"there is no {key} '{value}'{_closest(value, groups[key])}")
        elif key not in known and not key.startswith(free):
            raise UserError(f"unknown key '{key}'{_closest(key, known + list(groups))}")
    with initialize_config_dir(str(CONF), version_base=None):
        try:
            compose(config_name, [o for o in overrides if not o.startswith("hydra")])
        except HydraException as error:
            reason = str(error.__cause__ or "").split("\n")[0]
            raise UserError(f"{str(error).rstrip('.')}: {reason or 'see --help'}") from error


def register(config_name: str, schema: type) -> None:
    """Make ``<config_name>_schema`` known to Hydra; the YAML names it first in its defaults."""
    ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)


def run(config_name: str, schema: type, body: Callable[[DictConfig], None]) -> None:
    """Compose ``conf/<config_name>.yaml`` over ``schema`` with the command line and call ``body``.

    A UserError ends the process with status 2 and one line on stderr; VGRPO_DEBUG=1 shows the traceback.
    """
    register(config_name, schema)
    arguments = sys.argv[1:]
    try:
        if not {"--help", "-h", "--hydra-help"} & set(arguments):
            check_overrides(config_name, arguments)
        hydra.main(config_path=str(CONF), config_name=config_name, version_base=None)(_guarded(body))()
    except (UserError, HydraException) as error:
        _fail(error)


def _guarded(body: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    def inner(config: DictConfig) -> None:
        try:
            body(config)
        except UserError as error:  # inside, because Hydra would print a traceback of its own
            _fail(error)

    return inner


def _fail(error: Exception) -> None:
    if os.environ.get("VGRPO_DEBUG") == "1":
        raise error
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    sys.stdout.flush()
    raise SystemExit(2)

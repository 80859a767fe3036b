"""Rewards by name. Nothing is imported before it is asked for, so one reward's libraries are no other's need."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from core.errors import UserError
from core.rewards import Reward, RewardResult, ScoreSpec
from core.types import Request, Sample

REWARDS: dict[str, str] = {
    "scene": "rewards.scenes:SceneReward",
    "jpeg": "rewards.jpeg:JpegSize",
    "pickscore": "rewards.pickscore:PickScore",
}


class FunctionReward:
    """A plain function (samples, requests) -> one float per sample, as a reward named after it.

    The function sees only samples that were decoded; None or a non-finite float means "no score".
    """

    scope: Literal["sample"] = "sample"
    needs: frozenset[str] = frozenset()

    def __init__(self, name: str, function: Callable[..., Sequence[float | None] | Tensor]) -> None:
        self.name, self.function = name, function
        self.scores = (ScoreSpec(name, float("-inf"), float("inf")),)

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        rows = [i for i, sample in enumerate(samples) if sample.ok]
        values = self.function([samples[i] for i in rows], [requests[i] for i in rows]) if rows else []
        if len(values) != len(rows):
            raise UserError(
                f"reward function '{self.name}' returned {len(values)} scores for {len(rows)} samples; "
                "return one float per sample"
            )
        scores = torch.full((len(samples),), float("nan"))
        scores[rows] = torch.tensor([float("nan") if x is None else float(x) for x in values])
        return RewardResult({self.name: scores}, {self.name: scores.isfinite()})


def make_reward(name: str, **options: Any) -> Reward:
    """A reward of :data:`REWARDS`, or any "package.module:ClassOrFunction". Raises UserError for unknown ones."""
    target = REWARDS.get(name, name)
    if ":" not in target:
        raise UserError(f"reward '{name}' is unknown{_close(name, REWARDS)}; or give 'package.module:Name' of your own")
    module_name, attribute = target.split(":", 1)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise UserError(f"reward '{name}' cannot be imported ({error}); install or correct what it names") from error
    except AttributeError as error:
        raise UserError(f"module '{module_name}' of reward '{name}' has no '{attribute}'; correct the name") from error
    if inspect.isclass(found):
        _check_options(name, found, options, own=())
        reward = found(**options)
    elif inspect.isroutine(found):
        _check_options(name, found, options, own=list(inspect.signature(found).parameters)[:2])
        reward = FunctionReward(attribute, functools.partial(found, **options))
    else:
        raise UserError(f"reward '{name}' is a {type(found).__name__}; name a class or a function")
    if not isinstance(reward, Reward):
        raise UserError(f"reward '{name}' lacks part of the contract; give it scores, scope, needs and score(...)")
    return reward


def _check_options(name: str, target: Callable[..., Any], options: dict[str, Any], own: Sequence[str]) -> None:
    """Raises UserError for an option that ``target`` does not take, or one that it needs and lacks."""
    parameters = {k: p for k, p in inspect.signature(target).parameters.items() if k not in own}
    named = {k for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        for option in sorted(options.keys() - named):
            raise UserError(f"reward '{name}' has no option '{option}'{_close(option, named)}")
    for option in sorted(k for k in named - options.keys() if parameters[k].default is inspect.Parameter.empty):
        raise UserError(f"reward '{name}' needs the option '{option}'; add it to the reward's options")


def _close(word: str, known: Any) -> str:
    match = difflib.get_close_matches(word, sorted(known), n=1)
    if match:
        return f"; did you mean '{match[0]}'?"
    return f"; it takes {', '.join(sorted(known)) or 'none'}"

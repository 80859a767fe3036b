"""What is trained: all weights, or LoRA (peft) on chosen layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from core.errors import UserError


def make_trainable(
    modules: Mapping[str, nn.Module],
    mode: Literal["lora", "full"],
    *,
    rank: int = 32,
    alpha: int = 64,
    targets: Sequence[str] | str = ("to_q", "to_k", "to_v", "to_out.0"),
) -> dict[str, nn.Parameter]:
    """Freeze everything, then free what is trained; -> "module.parameter" -> parameter, in a fixed order.

    targets: peft's ``target_modules`` (suffixes, or one regular expression). LoRA weights are float32 whatever the
    base is. Raises UserError when nothing matches: an adapter bound to no layer trains nothing, silently.
    """
    if mode not in ("lora", "full"):
        raise UserError(f"tune.mode '{mode}' is unknown; choose lora or full")
    trainable: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        module.requires_grad_(mode == "full")
        if mode == "lora":
            _inject_lora(name, module, rank, alpha, targets)
        trainable.update({f"{name}.{key}": p for key, p in module.named_parameters() if p.requires_grad})
    if not trainable:
        raise UserError(f"the modules {sorted(modules)} have no parameter to train")
    return trainable


def _inject_lora(name: str, module: nn.Module, rank: int, alpha: int, targets: Sequence[str] | str) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    chosen = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, init_lora_weights="gaussian")
    try:
        inject_adapter_in_model(config, module, adapter_name="default")
    except ValueError as error:
        raise UserError(f"tune.targets {chosen} match no layer of '{name}'; name layers it has") from error
    if hasattr(module, "_hf_peft_config_loaded"):
        setattr(module, "_hf_peft_config_loaded", True)  # noqa: B010  what diffusers' save and load look at
    for p in module.parameters():
        if p.requires_grad:
            p.data = p.data.float()

"""What adapters over diffusers' pipelines share: loading with readable errors, grids, naming weights, export."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from core.errors import UserError
from core.schedules import dynamic_grid, linear_mu, static_grid

# The embedded pipelines' autoencoder: diffusers refuses a component whose module nobody has imported.
from modalities import linear_autoencoder

Pipeline = TypeVar("Pipeline", bound=DiffusionPipeline)


def load_pipeline(kind: type[Pipeline], path: str, dtype: torch.dtype) -> Pipeline:
    """The pipeline at a folder or hub id, frozen and in eval mode.

    Raises UserError when the folder does not exist, holds another pipeline, or the hub delivers none.
    """
    local, name = Path(path).exists(), kind.__name__
    # "owner/name" may be a hub id; any other spelling can only be meant as a folder.
    if not local and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise UserError(f"model path '{path}' does not exist; give a folder written by save_pretrained, or a hub id")
    if local and not (Path(path) / "model_index.json").is_file():
        raise UserError(f"'{path}' has no model_index.json; give a folder written by {name}.save_pretrained")
    try:
        found = DiffusionPipeline.load_config(path).get("_class_name")
        if found != name:
            raise UserError(f"'{path}' holds a {found}; this adapter needs a {name}")
        pipe = kind.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        fix = "save it again" if local else "check the name, run `hf auth login` if it is gated, or give a folder"
        raise UserError(f"'{path}' could not be loaded ({reason}); {fix}") from error
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(False)
    return pipe


def flow_match_grid(config: Mapping[str, Any], n_steps: int, tokens: int, shift: float | None = None) -> Tensor:
    """[n + 1]: the sigmas a pipeline gives its FlowMatchEulerDiscreteScheduler of this config; ``shift`` overrides it.

    Raises UserError for spacings that no core schedule reproduces; the models' own configs set none of them.
    """
    for option in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas"):
        if config.get(option):
            raise UserError(f"the scheduler sets {option}, which no grid here reproduces; turn it off in its config")
    if shift is not None or not config["use_dynamic_shifting"]:
        return static_grid(n_steps, config["shift"] if shift is None else shift)
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = linear_mu(tokens, *(config[name] for name in names))
    if config["time_shift_type"] == "linear":
        return static_grid(n_steps, mu)
    return dynamic_grid(n_steps, tokens, mu=mu, shift_terminal=config["shift_terminal"])


def digest(*modules: nn.Module) -> str:
    """A name for these weights that is cheap on T5-XXL: shapes, and the first values of every tensor."""
    sha = hashlib.sha256()
    for module in modules:
        for name, p in module.named_parameters():
            sha.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
            sha.update(p.detach().flatten()[:8].float().cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def export_transformer(pipe: DiffusionPipeline, transformer: nn.Module, path: str, folder: Path) -> None:
    """LoRA: what ``load_lora_weights(folder)`` reads, alpha included; otherwise the transformer's own folder.

    Beside it a README.md with the lines that load it. path: of the pipeline that was trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A component of this repository (the embedded autoencoder) loads only where its module is imported.
    own = sorted({type(part).__module__ for part in pipe.components.values()} & {linear_autoencoder.__name__})
    base = "".join(f"import {module}\n" for module in own) + f'pipe = {type(pipe).__name__}.from_pretrained("{path}"'
    if getattr(transformer, "peft_config", None):
        from peft import get_peft_model_state_dict

        pipe.save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name="default"),
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )
        code = f'{base})\npipe.load_lora_weights("{folder.name}")'
    else:
        transformer.save_pretrained(folder / "transformer")
        load = f'{type(transformer).__name__}.from_pretrained("{folder.name}", subfolder="transformer")'
        code = f"transformer = {load}\n{base}, transformer=transformer)"
    (folder / "README.md").write_text(f"Load with diffusers, from the folder above:\n\n```python\n{code}\n```\n")

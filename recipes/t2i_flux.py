"""Text to image on FLUX: the embedded pipeline by default, FLUX.1-dev with ``+experiment=paper_flux``.

python -m recipes.t2i_flux
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig

import modalities
from core.adapter import Adapter
from core.errors import UserError
from core.types import Request
from recipes import cli
from recipes.common import RecipeConfig, launch, read_prompts
from rewards import scenes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class ModelConfig:
    """path: "embedded", a folder, or a hub id. height, width: pixels. shift: static shift, null = the scheduler's own.
    device: auto, cpu or cuda. dtype: of the network; LoRA weights, schedules and losses stay float32."""

    path: str = "embedded"
    height: int = 32
    width: int = 32
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    max_sequence_length: int = 10
    shift: float | None = None
    dtype: str = "float32"
    device: str = "auto"
    gradient_checkpointing: bool = False
    offload_encoders: str = "release"
    decode_batch: int = 64


@dataclass
class DataConfig:
    """prompts, held_out: "scenes" (the embedded pipeline's own world) or a prompt file. eval_size: held-out samples;
    the held-out prompts are repeated with other noise to reach it."""

    prompts: str = "scenes"
    held_out: str | None = "scenes"
    eval_size: int = 480


@dataclass
class Config(RecipeConfig):
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)


# How often training asks for each tag: the hard ones more, for groups in which all samples are right teach nothing.
SHARE = {"single_object": 1, "colors": 1, "counting": 4, "two_object": 2, "color_attr": 2, "position": 2}


def scene_requests(held_out: bool, per_tag: int) -> list[Request]:
    """The scene grammar's prompts: held-out ones of every tag equally often, training ones ``SHARE`` times as often."""
    return [
        Request({"prompt": found[i % len(found)].prompt}, {}, {"tag": tag})
        for tag, found in scenes.split()[held_out].items()
        for i in range(per_tag * (1 if held_out else SHARE[tag]))
    ]


def make_requests(config: DictConfig) -> tuple[list[Request], list[Request]]:
    data = config.data
    train = scene_requests(False, 100) if data.prompts == "scenes" else read_prompts(data.prompts)
    if data.held_out is None or data.eval_size < 1:
        return train, []
    if data.held_out == "scenes":
        tags = len(scenes.TAGS)
        return train, scene_requests(True, -(-data.eval_size // tags))
    rows = read_prompts(data.held_out)
    return train, [rows[i % len(rows)] for i in range(data.eval_size)]


def make_adapter(config: DictConfig, device: torch.device) -> Adapter:
    from modalities.flux import FluxAdapter

    options = dict(config.model)
    dtype, where, path = options.pop("dtype"), options.pop("device"), options.pop("path")
    if dtype not in DTYPES:
        raise UserError(f"model.dtype '{dtype}' is unknown; choose one of {', '.join(DTYPES)}")
    if where == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device is cuda but torch sees no GPU; use model.device=cpu, or install a CUDA build")
    if where not in ("auto", "cpu", "cuda"):
        raise UserError(f"model.device '{where}' is unknown; choose auto, cpu or cuda")
    if path == "embedded":
        # Relative where it can be: the path is quoted in the run's files, which may travel.
        path = os.path.relpath(modalities.EMBEDDED_FLUX)
    return FluxAdapter(path, dtype=DTYPES[dtype], device=device, **options)


def main(config: DictConfig) -> None:
    launch(config, make_adapter, make_requests)


if __name__ == "__main__":
    cli.run("t2i_flux", Config, main)

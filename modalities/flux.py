"""FLUX.1 text to image through diffusers' `FluxPipeline`: the real model and the embedded one, by the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from core.adapter import Adapter, Layout
from core.errors import UserError
from core.guidance import Guidance
from core.processes import RectifiedFlow
from core.streams import StreamSpec
from core.types import Conditioning, Noise, Predictions, Request, Sample, State
from modalities.pipelines import digest, export_transformer, flow_match_grid, load_pipeline

Size = tuple[int, int]  # height, width in pixels


class FluxAdapter(Adapter):
    """path: a folder or a hub id. height, width: pixels where a request's geometry names none.

    guidance_scale is embedded (an input of guidance-distilled models; others ignore it, as the pipeline does).
    true_cfg_scale > 1 adds classifier-free guidance with the request's "negative_prompt" (default empty).
    shift: a static shift in place of the scheduler's own (DanceGRPO and MixGRPO sample FLUX with 3).
    offload_encoders: what happens to the text encoders once all prompts are encoded: "release" or move to the "cpu".
    Sizes may differ within a batch; `predict` then calls the network once per size, so shard equal sizes together.
    """

    streams = (StreamSpec("image", RectifiedFlow(), "velocity", ("token",), ("channel",)),)

    def __init__(
        self,
        path: str | Path,
        *,
        height: int,
        width: int,
        guidance_scale: float = 3.5,
        true_cfg_scale: float = 1.0,
        max_sequence_length: int = 512,
        shift: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        gradient_checkpointing: bool = False,
        offload_encoders: Literal["release", "cpu"] = "release",
        decode_batch: int = 4,
    ) -> None:
        if offload_encoders not in ("release", "cpu"):
            raise UserError(f"offload_encoders '{offload_encoders}' is unknown; choose release or cpu")
        self.path, self.height, self.width = str(path), height, width
        self.guidance_scale, self.max_sequence_length, self.shift = guidance_scale, max_sequence_length, shift
        self.offload_encoders, self.decode_batch = offload_encoders, decode_batch
        self.device = torch.device(device)
        self.autocast_dtype = None if dtype == torch.float32 else dtype
        self.pipe = load_pipeline(FluxPipeline, self.path, dtype).to(self.device)
        self.transformer = self.pipe.transformer
        if gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.embedded = bool(self.transformer.config.guidance_embeds)
        if true_cfg_scale > 1:
            self.guidance = Guidance("cfg", true_cfg_scale)
        elif self.embedded:
            self.guidance = Guidance("embedded", guidance_scale)
        self.step = 2 * self.pipe.vae_scale_factor  # pixels a token is wide and high
        self._size({})
        self._encoders = digest(self.pipe.text_encoder, self.pipe.text_encoder_2)

    def _size(self, geometry: Mapping[str, Any]) -> Size:
        size = int(geometry.get("height", self.height)), int(geometry.get("width", self.width))
        for name, value in zip(("height", "width"), size, strict=True):
            low = value // self.step * self.step
            if value != low or low <= 0:
                fix = f"{low} or {low + self.step}" if low > 0 else f"{self.step}"
                raise UserError(f"{name} {value} is not a multiple of {self.step}, which this FLUX needs; use {fix}")
        return size

    def _tokens(self, size: Size) -> int:
        return size[0] * size[1] // self.step**2

    def _by_size(self, cond: Conditioning) -> dict[Size, Tensor]:
        """Size -> the rows that have it, int64."""
        rows: dict[Size, list[int]] = {}
        for i, geometry in enumerate(cond.geometry):
            rows.setdefault(self._size(geometry), []).append(i)
        return {size: torch.tensor(chosen) for size, chosen in rows.items()}

    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        sites = [(self._tokens(self._size(geometry)),) for geometry in cond.geometry]
        return {"image": Layout(sites, (self.transformer.config.in_channels,))}

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Conditioning:
        """-> prompt_embeds [B, S, D], pooled [B, P], guidance [B] where embedded, null_* under true guidance.

        Raises UserError for an illegal size, a request without a prompt, or after the encoders were released.
        """
        for request in requests:
            self._size(request.geometry)
            if "prompt" not in request.inputs:
                raise UserError(f"a request has inputs {sorted(request.inputs)} but no 'prompt'; FLUX needs one")
        tensors = self._text([request.inputs["prompt"] for request in requests])
        if self.guidance.mode == "cfg":
            negative = self._text([request.inputs.get("negative_prompt") or "" for request in requests])
            tensors |= {f"null_{name}": x for name, x in negative.items()}
        if self.embedded:
            tensors["guidance"] = torch.full((len(requests),), self.guidance_scale, device=self.device)
        return Conditioning(tensors, tuple(dict(request.geometry) for request in requests))

    def _text(self, prompts: list[str]) -> dict[str, Tensor]:
        if self.pipe.text_encoder is None:
            raise UserError(
                f"prompt '{prompts[0][:60]}' cannot be encoded: the text encoders were released; encode every prompt "
                "before training, or use offload_encoders=cpu"
            )
        tokens, pooled, _ = self.pipe.encode_prompt(
            prompts, None, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": tokens, "pooled": pooled}

    def release_encoders(self) -> None:
        if self.offload_encoders == "cpu":
            self.pipe.text_encoder.to("cpu")
            self.pipe.text_encoder_2.to("cpu")
        else:
            self.pipe.text_encoder = self.pipe.text_encoder_2 = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fingerprint(self) -> str:
        scale = self.guidance_scale if self.embedded else None
        return f"flux {self.path} {self._encoders} {self.max_sequence_length} {scale} {self.guidance.mode}"

    def grid(self, n_steps: int, cond: Conditioning) -> Tensor:
        """[n + 1], as the pipeline's scheduler spaces it; [n + 1, B] where the shift differs by size."""
        config = self.pipe.scheduler.config
        grids = {size: flow_match_grid(config, n_steps, self._tokens(size), self.shift) for size in self._by_size(cond)}
        if len(grids) == 1:
            return next(iter(grids.values()))
        return torch.stack([grids[self._size(geometry)] for geometry in cond.geometry], dim=1)

    def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
        """Drawn in image layout [1, C, h, w], then packed: the same seeds give the pipeline's own noise."""
        channels = self.transformer.config.in_channels // 4
        noise = torch.zeros(len(cond), *self.layout(cond)["image"].padded, 4 * channels)
        for row, (geometry, g) in enumerate(zip(cond.geometry, generators, strict=True)):
            h, w = (pixels // self.pipe.vae_scale_factor for pixels in self._size(geometry))
            x = torch.randn(1, channels, h, w, generator=g, device=g.device)
            packed = self.pipe._pack_latents(x, 1, channels, h, w)
            noise[row, : packed.shape[1]] = packed[0].cpu()
        return {"image": noise.to(self.device)}

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        value, prefix = noisy["image"].value, "" if branch == "cond" else f"{branch}_"
        out = torch.zeros_like(value)
        for (height, width), rows in self._by_size(cond).items():
            h, w = height // self.step, width // self.step
            part = cond.index(rows).tensors
            text = part[f"{prefix}prompt_embeds"]
            velocity = self.transformer(
                hidden_states=value[rows, : h * w],
                # There and back, as the pipeline does: float32 rounds on the way, and images are to agree.
                timestep=t[rows] * 1000 / 1000,
                guidance=part.get("guidance"),
                pooled_projections=part[f"{prefix}pooled"],
                encoder_hidden_states=text,
                txt_ids=torch.zeros(text.shape[1], 3, device=self.device),
                img_ids=self.pipe._prepare_latent_image_ids(1, h, w, self.device, torch.float32),
                return_dict=False,
            )[0]
            out[rows, : h * w] = velocity.to(out.dtype)
        return {"image": out}

    @torch.no_grad()
    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        """Part "image": uint8 [H, W, 3] on the CPU, rounded as the pipeline rounds; not ok where it is not finite."""
        samples, vae = [Sample({}, ok=False)] * len(cond), self.pipe.vae
        for size, rows in self._by_size(cond).items():
            for part in rows.split(self.decode_batch):
                latents = clean["image"].value[part, : self._tokens(size)]
                latents = self.pipe._unpack_latents(latents, *size, self.pipe.vae_scale_factor)
                latents = latents / vae.config.scaling_factor + vae.config.shift_factor
                pixels = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
                good = (latents.isfinite().flatten(1).all(1) & pixels.isfinite().flatten(1).all(1)).tolist()
                images = self.pipe.image_processor.postprocess(torch.nan_to_num(pixels), output_type="np")
                for row, ok, image in zip(part.tolist(), good, images, strict=True):
                    if ok:
                        samples[row] = Sample({"image": torch.from_numpy((image * 255).round().astype(np.uint8))})
        return samples

    def modules(self) -> Mapping[str, nn.Module]:
        return {"transformer": self.transformer}

    def export(self, folder: Path) -> None:
        export_transformer(self.pipe, self.transformer, self.path, folder)

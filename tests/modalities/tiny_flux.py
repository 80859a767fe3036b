"""A random FluxPipeline of the real classes, small enough to build in a second: VAE factor 4, so 8 pixels a token."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

TEXT_WIDTH = 32


def clip_tokenizer(length: int = 77) -> CLIPTokenizer:
    """One token a letter."""
    letters = [*string.ascii_lowercase, *(f"{c}</w>" for c in string.ascii_lowercase)]
    vocabulary = {token: i for i, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase]
    return T5Tokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0)


def build_tiny_flux(seed: int = 0, guidance_embeds: bool = True, **scheduler: Any) -> FluxPipeline:
    """scheduler: its config in place of FLUX.1-dev's."""
    torch.manual_seed(seed)
    tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=16,
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(3)  # so that images use the whole range, clamped values included
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=TEXT_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    t5 = T5Config(vocab_size=len(tokenizer_2), d_model=TEXT_WIDTH, d_kv=16, d_ff=TEXT_WIDTH, num_layers=1, num_heads=2)
    dev = {"shift": 3.0, "use_dynamic_shifting": True}
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or dev)),
        vae=vae.eval(),
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=tokenizer_2,
        transformer=transformer.eval(),
    )


def save_tiny_flux(folder: Path, **options: Any) -> Path:
    build_tiny_flux(**options).save_pretrained(folder)
    return folder

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

import modalities
import modalities.linear_autoencoder  # diffusers looks a component's module up among the imported ones
from recipes.embed_flux import TEXT_LENGTH, encode_prompts, render_pool, to_latents, to_pixels
from rewards.scenes import all_prompts, split, verify

FOLDER = Path(next(iter(modalities.__path__))) / "embedded" / "flux"
PROMPT = "a red circle left of a green cross"


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(FOLDER, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for module in (pipe.vae, pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        module.requires_grad_(False)
    return pipe


@pytest.fixture(scope="module")
def pool() -> tuple[np.ndarray, list]:
    return render_pool(split(0)[0], 300, np.random.default_rng(0))


def draw(pipe: FluxPipeline, seed: int = 0) -> np.ndarray:
    """[1, 32, 32, 3] in [0, 1]."""
    return pipe(
        PROMPT,
        height=32,
        width=32,
        num_inference_steps=4,
        max_sequence_length=TEXT_LENGTH,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images


def test_folder_is_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 10e6


def test_every_prompt_fits_the_tokenizers(pipe):
    prompts = [scene.prompt for scenes in all_prompts().values() for scene in scenes]
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        rows = tokenizer([*prompts, PROMPT.upper()]).input_ids
        assert all(tokenizer.unk_token_id not in row for row in rows)
        assert all(len(row) <= TEXT_LENGTH and row[-1] == tokenizer.eos_token_id for row in rows)
        assert tokenizer.unk_token_id in tokenizer("a purple circle").input_ids


def test_pipeline_draws_at_its_size(pipe):
    image = draw(pipe)
    assert image.shape == (1, 32, 32, 3)
    assert np.isfinite(image).all()


def test_pipeline_saves_and_loads_again(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    again = FluxPipeline.from_pretrained(tmp_path, local_files_only=True)
    again.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(draw(pipe), draw(again))


def test_text_encoders_tell_bindings_apart(pipe):
    tokens, pooled = encode_prompts(pipe, ["a red circle and a green cross", "a green circle and a red cross"])
    assert tokens.shape == (2, TEXT_LENGTH, pipe.transformer.config.joint_attention_dim)
    for vectors in (tokens.flatten(1), pooled):
        assert torch.cosine_similarity(vectors[0], vectors[1], dim=0) < 0.95


def test_autoencoder_reconstructions_pass_the_verifier(pipe, pool):
    images, scenes = pool
    latents = pipe.vae.encode(to_pixels(images)).latent_dist.mode()
    pixels = pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0], output_type="np")
    decoded = (pixels * 255).round().astype(np.uint8)
    assert np.mean([verify(image, scene)["correct"] for image, scene in zip(decoded, scenes, strict=True)]) >= 0.95


def test_latents_are_packed_as_the_pipeline_packs_them_and_have_unit_variance(pipe, pool):
    images, _ = pool
    packed = to_latents(pipe.vae, images)
    assert packed.shape == (len(images), 16, pipe.transformer.config.in_channels)
    assert abs(packed.std().item() - 1) < 0.1
    unpacked = pipe._unpack_latents(packed, 32, 32, pipe.vae_scale_factor)
    latents = unpacked / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    torch.testing.assert_close(latents, pipe.vae.encode(to_pixels(images)).latent_dist.mode(), atol=1e-5, rtol=1e-5)

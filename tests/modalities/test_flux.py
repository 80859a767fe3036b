"""FluxAdapter against diffusers' own pipeline, on a random tiny FLUX of the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from core.cache import ConditioningCache
from core.errors import UserError
from core.parameters import make_trainable
from core.samplers import euler
from core.types import Conditioning, Request, Sample
from modalities.flux import FluxAdapter
from modalities.linear_autoencoder import LinearAutoencoder
from tests.modalities.tiny_flux import build_tiny_flux, save_tiny_flux

PROMPTS = ["a red cat", "two dogs", "zebra on the left of an owl"]
LENGTH, STEPS = 16, 4


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="session")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_flux(tmp_path_factory.mktemp("flux") / "schnell", seed=1, guidance_embeds=False, shift=1.0)


def adapter_at(path: Path | str, **options: Any) -> FluxAdapter:
    return FluxAdapter(path, **{"height": 32, "width": 32, "max_sequence_length": LENGTH} | options)


def frozen(pipe: FluxPipeline) -> FluxPipeline:
    """PyTorch picks other convolutions for weights that want gradients; bits can only agree when both are frozen."""
    for module in (pipe.vae, pipe.transformer):
        module.requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe(folder: Path) -> FluxPipeline:
    return frozen(FluxPipeline.from_pretrained(folder))


def generators(seeds: range | list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def requests_of(prompts: list[str], **geometry: int) -> list[Request]:
    return [Request({"prompt": prompt}, geometry) for prompt in prompts]


def sample(adapter: FluxAdapter, cond: Conditioning, seeds: list[int], steps: int = STEPS) -> list[Sample]:
    noise = adapter.draw(cond, generators(seeds))
    predict = adapter.guidance.bind(adapter, cond)
    clean = euler(predict, adapter.prior(noise, cond), noise, adapter.grid(steps, cond), adapter.streams)
    return adapter.decode(clean, cond)


def reference(
    pipe: FluxPipeline, prompts: list[str], seeds: list[int], height: int, width: int, **options: Any
) -> list[np.ndarray]:
    images = pipe(
        prompts,
        height=height,
        width=width,
        num_inference_steps=STEPS,
        generator=generators(seeds),
        max_sequence_length=LENGTH,
        **options,
    ).images
    return [np.asarray(image) for image in images]


def assert_same(samples: list[Sample], images: list[np.ndarray]) -> None:
    for s, image in zip(samples, images, strict=True):
        assert s.ok and s.parts["image"].dtype == torch.uint8
        np.testing.assert_array_equal(s.parts["image"].numpy(), image)


# ---- agreement with the pipeline ----


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 56)])
def test_images_equal_the_pipelines(folder: Path, pipe: FluxPipeline, height: int, width: int) -> None:
    adapter = adapter_at(folder, height=height, width=width)
    images = reference(pipe, PROMPTS, [0, 1, 2], height, width)
    assert len({image.tobytes() for image in images}) == 3 and images[0].std() > 20
    assert_same(sample(adapter, adapter.encode(requests_of(PROMPTS)), [0, 1, 2]), images)


def test_two_sizes_in_one_batch(folder: Path, pipe: FluxPipeline) -> None:
    adapter = adapter_at(folder)
    wide, square = {"height": 24, "width": 40}, {}
    sizes = [wide, square, wide]
    cond = adapter.encode([Request({"prompt": p}, g) for p, g in zip(PROMPTS, sizes, strict=True)])
    grid = adapter.grid(STEPS, cond)
    assert grid.shape == (STEPS + 1, 3) and not torch.equal(grid[:, 0], grid[:, 1])
    samples = sample(adapter, cond, [0, 1, 2])
    assert_same([samples[0], samples[2]], reference(pipe, [PROMPTS[0], PROMPTS[2]], [0, 2], 24, 40))
    assert_same([samples[1]], reference(pipe, [PROMPTS[1]], [1], 32, 32))
    noise = adapter.draw(cond, generators([0, 1, 2]))
    state = adapter.prior(noise, cond)
    assert state["image"].valid.sum(1).tolist() == [15, 16, 15]
    out = adapter.forward(state, grid[0], cond)["image"]
    assert bool((out[0, 15:] == 0).all()) and bool((out[1] != 0).any(-1).all())


def test_true_guidance_equals_the_pipelines(folder: Path, pipe: FluxPipeline) -> None:
    adapter = adapter_at(folder, true_cfg_scale=3.0)
    asked = [Request({"prompt": PROMPTS[0], "negative_prompt": "blurry"}), Request({"prompt": PROMPTS[1]})]
    images = reference(pipe, PROMPTS[:2], [0, 1], 32, 32, negative_prompt=["blurry", ""], true_cfg_scale=3.0)
    assert_same(sample(adapter, adapter.encode(asked), [0, 1]), images)
    assert not np.array_equal(images[0], reference(pipe, PROMPTS[:2], [0, 1], 32, 32)[0])


def test_a_model_without_embedded_guidance(schnell: Path) -> None:
    adapter = adapter_at(schnell)
    cond = adapter.encode(requests_of(PROMPTS))
    assert adapter.guidance.mode == "none" and "guidance" not in cond.tensors
    other = frozen(FluxPipeline.from_pretrained(schnell))
    assert_same(sample(adapter, cond, [0, 1, 2]), reference(other, PROMPTS, [0, 1, 2], 32, 32))
    torch.testing.assert_close(adapter.grid(4, cond), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))


def test_embedded_guidance_is_part_of_the_conditioning(folder: Path, pipe: FluxPipeline) -> None:
    adapter = adapter_at(folder, guidance_scale=1.5)
    cond = adapter.encode(requests_of(PROMPTS[:1]))
    assert adapter.guidance.mode == "embedded" and cond.tensors["guidance"].tolist() == [1.5]
    assert_same(sample(adapter, cond, [0]), reference(pipe, PROMPTS[:1], [0], 32, 32, guidance_scale=1.5))


@pytest.mark.parametrize("steps", [1, 4, 10, 28])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 128), (512, 512)])
def test_grid_equals_the_schedulers(folder: Path, pipe: FluxPipeline, steps: int, height: int, width: int) -> None:
    adapter = adapter_at(folder, height=height, width=width)
    grid = adapter.grid(steps, Conditioning({}, ({},)))
    tokens = height * width // 64
    mu = 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
    pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    torch.testing.assert_close(grid, pipe.scheduler.sigmas, rtol=0, atol=1e-6)


def test_a_static_shift_replaces_the_schedulers(folder: Path) -> None:
    grid = adapter_at(folder, shift=3.0).grid(4, Conditioning({}, ({},)))
    torch.testing.assert_close(grid, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))


def test_noise_is_the_pipelines_and_free_of_the_batch(folder: Path, pipe: FluxPipeline) -> None:
    adapter = adapter_at(folder)
    cond = adapter.encode(requests_of(PROMPTS))
    noise = adapter.draw(cond, generators([5, 6, 7]))["image"]
    theirs, _ = pipe.prepare_latents(3, 16, 32, 32, torch.float32, torch.device("cpu"), generators([5, 6, 7]))
    assert torch.equal(noise, theirs)
    alone = adapter.draw(cond.index(torch.tensor([2])), generators([7]))["image"]
    assert torch.equal(alone[0], noise[2])


# ---- conditioning ----


def test_cache_gives_what_encode_gives(folder: Path, tmp_path: Path) -> None:
    adapter = adapter_at(folder)
    asked = [*requests_of(PROMPTS[:2]), *requests_of(PROMPTS[2:], height=24, width=40)]
    direct = adapter.encode(asked)
    cache = ConditioningCache(adapter, tmp_path)
    assert cache.prepare(asked) == 3
    assert ConditioningCache(adapter, tmp_path).prepare(asked) == 0
    adapter.release_encoders()
    cached = ConditioningCache(adapter, tmp_path).get(asked)
    assert cached.geometry == direct.geometry and cached.tensors.keys() == direct.tensors.keys()
    for name, x in direct.tensors.items():
        assert torch.equal(cached.tensors[name], x), name
    for ours, theirs in zip(sample(adapter, cached, [0, 1, 2]), sample(adapter, direct, [0, 1, 2]), strict=True):
        assert torch.equal(ours.parts["image"], theirs.parts["image"])


def test_encoding_again_gives_the_same(folder: Path) -> None:
    adapter = adapter_at(folder)
    first, second = (adapter.encode(requests_of(PROMPTS)).tensors for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_fingerprint_separates_what_encodes_differently(folder: Path, schnell: Path, tmp_path: Path) -> None:
    base = adapter_at(folder).fingerprint()
    assert adapter_at(folder).fingerprint() == base
    others = [
        adapter_at(folder, guidance_scale=1.0),
        adapter_at(folder, max_sequence_length=LENGTH + 1),
        adapter_at(folder, true_cfg_scale=2.0),
        adapter_at(folder, dtype=torch.bfloat16),
        adapter_at(schnell),
    ]
    assert len({base, *(a.fingerprint() for a in others)}) == 6
    # The same path holding another model is another model.
    same_path = save_tiny_flux(tmp_path / "model")
    before = adapter_at(same_path).fingerprint()
    save_tiny_flux(same_path, seed=9)
    assert adapter_at(same_path).fingerprint() != before


def test_released_encoders(folder: Path) -> None:
    adapter = adapter_at(folder)
    adapter.release_encoders()
    with pytest.raises(UserError, match="'a red cat' cannot be encoded: the text encoders were released"):
        adapter.encode(requests_of(PROMPTS))
    kept = adapter_at(folder, offload_encoders="cpu")
    kept.release_encoders()
    assert len(kept.encode(requests_of(PROMPTS))) == 3


# ---- training and export ----


def disturb(parameters: dict[str, torch.nn.Parameter], scale: float) -> None:
    """A stand-in for training: LoRA's B is zero before it."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in parameters.values():
            p.add_(scale * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize(
    ("rank", "alpha", "targets"),
    [
        (4, 16, ("to_q", "to_k", "to_v", "to_out.0")),
        (2, 3, r".*transformer_blocks\.0\.(attn\.to_q|proj_mlp|ff\.net\.2)"),
    ],
)
def test_lora_export_loads_into_the_pipeline(
    folder: Path, pipe: FluxPipeline, tmp_path: Path, rank: int, alpha: int, targets: tuple[str, ...] | str
) -> None:
    adapter = adapter_at(folder)
    before = {k: v.clone() for k, v in adapter.transformer.state_dict().items()}
    disturb(make_trainable(adapter.modules(), "lora", rank=rank, alpha=alpha, targets=targets), 0.3)
    trained = sample(adapter, adapter.encode(requests_of(PROMPTS)), [0, 1, 2])
    adapter.export(tmp_path / "lora")
    after = {k.replace(".base_layer", ""): v for k, v in adapter.transformer.state_dict().items()}
    assert all(torch.equal(after[name], x) for name, x in before.items())
    loaded = FluxPipeline.from_pretrained(folder)
    loaded.load_lora_weights(tmp_path / "lora")
    images = reference(frozen(loaded), PROMPTS, [0, 1, 2], 32, 32)
    assert_same(trained, images)
    assert not np.array_equal(images[0], reference(pipe, PROMPTS, [0, 1, 2], 32, 32)[0])
    assert "load_lora_weights" in (tmp_path / "lora" / "README.md").read_text()
    assert {p.name for p in (tmp_path / "lora").iterdir()} == {"README.md", "pytorch_lora_weights.safetensors"}


def test_full_export_loads_into_the_pipeline(folder: Path, tmp_path: Path) -> None:
    adapter = adapter_at(folder)
    disturb(make_trainable(adapter.modules(), "full"), 0.02)
    trained = sample(adapter, adapter.encode(requests_of(PROMPTS)), [0, 1, 2])
    adapter.export(tmp_path / "full")
    transformer = FluxTransformer2DModel.from_pretrained(tmp_path / "full", subfolder="transformer")
    loaded = frozen(FluxPipeline.from_pretrained(folder, transformer=transformer))
    assert_same(trained, reference(loaded, PROMPTS, [0, 1, 2], 32, 32))
    assert 'subfolder="transformer"' in (tmp_path / "full" / "README.md").read_text()


def test_a_pipeline_with_this_repositorys_autoencoder(tmp_path: Path) -> None:
    pipe = build_tiny_flux()
    pipe.register_modules(vae=LinearAutoencoder().eval())
    pipe.save_pretrained(tmp_path / "embedded")
    adapter = adapter_at(tmp_path / "embedded")
    images = reference(frozen(pipe), PROMPTS, [0, 1, 2], 32, 32)
    assert_same(sample(adapter, adapter.encode(requests_of(PROMPTS)), [0, 1, 2]), images)
    make_trainable(adapter.modules(), "lora", rank=2, alpha=2)
    adapter.export(tmp_path / "lora")
    # diffusers loads such a component only where its module has been imported; the reader must be told.
    assert "import modalities.linear_autoencoder\n" in (tmp_path / "lora" / "README.md").read_text()


def gradients(adapter: FluxAdapter) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    parameters = make_trainable(adapter.modules(), "lora", rank=4, alpha=8)
    disturb(parameters, 0.1)
    cond = adapter.encode([Request({"prompt": p}, {"width": w}) for p, w in zip(PROMPTS, (32, 48, 32), strict=True)])
    state = adapter.prior(adapter.draw(cond, generators([0, 1, 2])), cond)
    adapter.forward(state, torch.tensor([0.9, 0.5, 0.2]), cond)["image"].square().sum().backward()
    networks = (adapter.transformer, adapter.pipe.vae)
    with_gradient = {name for net in networks for name, p in net.named_parameters() if p.grad is not None}
    assert with_gradient == {name.removeprefix("transformer.") for name in parameters}
    return {name: p.grad for name, p in parameters.items()}


def test_gradient_reaches_lora_only_and_checkpointing_changes_nothing(folder: Path) -> None:
    plain, saved = gradients(adapter_at(folder)), gradients(adapter_at(folder, gradient_checkpointing=True))
    assert all(bool((g != 0).any()) for g in plain.values())
    for name, g in plain.items():
        torch.testing.assert_close(saved[name], g)


def test_bfloat16_weights_with_float32_lora(folder: Path) -> None:
    adapter = adapter_at(folder, dtype=torch.bfloat16)
    assert adapter.transformer.dtype == torch.bfloat16 and adapter.autocast_dtype == torch.bfloat16
    grads = gradients(adapter)
    assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in grads.values())
    cond = adapter.encode(requests_of(PROMPTS))
    state = adapter.prior(adapter.draw(cond, generators([0, 1, 2])), cond)
    assert adapter.forward(state, torch.ones(3), cond)["image"].dtype == torch.float32
    assert all(s.ok for s in sample(adapter, cond, [0, 1, 2]))


# ---- what can go wrong ----


def test_garbage_latents_are_bad_samples_and_hurt_no_other(folder: Path) -> None:
    adapter = adapter_at(folder)
    cond = adapter.encode(requests_of([PROMPTS[0]] * 4))
    state = adapter.prior(adapter.draw(cond, generators([0, 1, 2, 3])), cond)
    good = adapter.decode(state, cond)
    value = state["image"].value.clone()
    value[1, 3, 5], value[2] = float("nan"), float("inf")
    samples = adapter.decode({"image": state["image"].with_value(value)}, cond)
    assert [s.ok for s in samples] == [True, False, False, True] and samples[1].parts == {}
    for i in (0, 3):
        assert torch.equal(samples[i].parts["image"], good[i].parts["image"])
    huge = adapter.decode({"image": state["image"].with_value(value.nan_to_num() * 0 + 1e38)}, cond)
    assert len(huge) == 4


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [
        (36, 32, "height 36 is not a multiple of 8.*use 32 or 40"),
        (32, 4, "width 4 .*use 8"),
        (0, 32, "height 0 .*use 8"),
    ],
)
def test_illegal_sizes(folder: Path, height: int, width: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapter_at(folder, height=height, width=width)
    with pytest.raises(UserError, match=message):
        adapter_at(folder).encode(requests_of(PROMPTS, height=height, width=width))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/flux", "~/flux", "outputs/models/flux", "flux"])
def test_missing_folder(path: str) -> None:
    with pytest.raises(UserError, match=f"model path '{path}' does not exist; give a folder"):
        adapter_at(path)


def test_folders_without_a_flux(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="has no model_index.json"):
        adapter_at(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(UserError, match="holds a StableDiffusion3Pipeline; this adapter needs a FluxPipeline"):
        adapter_at(tmp_path)
    broken = save_tiny_flux(tmp_path / "broken")
    for file in (broken / "transformer").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="could not be loaded .*; save it again"):
        adapter_at(broken)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="'nobody/flux' could not be loaded .*check the name") as caught:
        adapter_at("nobody/flux")
    assert "\n" not in str(caught.value)


def test_a_request_without_a_prompt_and_bad_options(folder: Path) -> None:
    with pytest.raises(UserError, match=r"inputs \['text'\] but no 'prompt'"):
        adapter_at(folder).encode([Request({"text": "a cat"})])
    with pytest.raises(UserError, match="offload_encoders 'disk' is unknown"):
        adapter_at(folder, offload_encoders="disk")


def test_a_scheduler_no_grid_reproduces(tmp_path: Path) -> None:
    adapter = adapter_at(save_tiny_flux(tmp_path, use_karras_sigmas=True))
    with pytest.raises(UserError, match="use_karras_sigmas"):
        adapter.grid(4, Conditioning({}, ({},)))

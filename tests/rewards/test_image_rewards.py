"""JPEG size, PickScore on a tiny random CLIP, and the registry."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from core.errors import UserError
from core.rewards import Reward, RewardResult, checked
from core.types import Request, Sample
from rewards import REWARDS, make_reward
from rewards.jpeg import JpegSize
from rewards.pickscore import PickScore
from tests.modalities.tiny_flux import clip_tokenizer

PROMPTS = ["a red cat", "two dogs", "zebra", "an owl on a house", "x"]
CROP = 16


def images(n: int = 5, seed: int = 0) -> list[torch.Tensor]:
    """Different sizes, smooth to noisy."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        height, width = 20 + 4 * i, 40 - 2 * i
        noise = rng.integers(0, 256, (height, width, 3)) * i / n
        out.append(torch.from_numpy((noise + rng.integers(0, 50, (1, 1, 3))).clip(0, 255).astype(np.uint8)))
    return out


def score(reward: Reward, pictures: list[torch.Tensor], prompts: list[str]) -> RewardResult:
    samples = [Sample({"image": image}) for image in pictures]
    return checked(reward, samples, [Request({"prompt": p}) for p in prompts], torch.zeros(len(samples)))


# ---- JPEG ----


def test_jpeg_size_is_minus_the_kilobytes() -> None:
    pictures = images()
    result = score(JpegSize(), pictures, PROMPTS)
    for value, image in zip(result.scores["jpeg_size"].tolist(), pictures, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image.numpy()).save(buffer, "JPEG", quality=95)
        assert value == pytest.approx(-len(buffer.getvalue()) / 1000)
    assert torch.equal(score(JpegSize(larger=True), pictures, PROMPTS).scores["jpeg_size"], -result.scores["jpeg_size"])
    assert bool((score(JpegSize(quality=20), pictures, PROMPTS).scores["jpeg_size"] > result.scores["jpeg_size"]).all())


def test_jpeg_of_a_bad_sample_is_no_score() -> None:
    samples = [Sample({"image": images(1)[0]}), Sample({}, ok=False)]
    result = checked(JpegSize(), samples, [Request()] * 2, torch.zeros(2))
    assert result.valid["jpeg_size"].tolist() == [True, False] and math.isnan(result.scores["jpeg_size"][1])
    with pytest.raises(UserError, match="quality 0 is outside"):
        JpegSize(quality=0)


# ---- PickScore ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CLIPModel and its processor, saved as the real ones are."""
    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    tokenizer = clip_tokenizer(length=12)
    layers = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = layers | ids | {"vocab_size": len(tokenizer), "max_position_embeddings": 12}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config=layers | {"image_size": CROP, "patch_size": 8}, projection_dim=16)
    )
    model.save_pretrained(path)
    processor = CLIPImageProcessor(size={"shortest_edge": CROP}, crop_size={"height": CROP, "width": CROP})
    CLIPProcessor(processor, tokenizer).save_pretrained(path)
    return path


def independent(folder: Path, image: torch.Tensor, prompt: str) -> float:
    """Raw PickScore of one pair, step by step: PIL resize and centre crop, letters to ids, CLIP's own forward."""
    model = CLIPModel.from_pretrained(folder).eval()
    picture = Image.fromarray(image.numpy())
    scale = CROP / min(picture.size)
    width, height = (max(CROP, int(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - CROP) // 2, (height - CROP) // 2
    picture = picture.crop((left, top, left + CROP, top + CROP))
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((torch.from_numpy(np.asarray(picture).copy()) / 255 - mean) / std).permute(2, 0, 1)[None]
    ids = clip_tokenizer(length=12)(prompt, truncation=True, max_length=12, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=pixels).logits_per_text.item()


def test_pickscore_equals_an_independent_computation(folder: Path) -> None:
    pictures = images()
    raw = score(PickScore(str(folder), str(folder), divisor=1.0), pictures, PROMPTS).scores["pickscore"]
    expected = [independent(folder, image, prompt) for image, prompt in zip(pictures, PROMPTS, strict=True)]
    torch.testing.assert_close(raw, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert raw.dtype == torch.float32 and raw.std() > 0.01
    scaled = score(PickScore(str(folder), str(folder)), pictures, PROMPTS).scores["pickscore"]
    torch.testing.assert_close(scaled, raw / 26)


def test_pickscore_follows_permutations_and_batches(folder: Path) -> None:
    pictures, order = images(), [3, 0, 4, 1, 2]
    reward = PickScore(str(folder), str(folder))
    straight = score(reward, pictures, PROMPTS).scores["pickscore"]
    shuffled = score(reward, [pictures[i] for i in order], [PROMPTS[i] for i in order]).scores["pickscore"]
    torch.testing.assert_close(shuffled, straight[order])
    small = score(PickScore(str(folder), str(folder), batch=2), pictures, PROMPTS).scores["pickscore"]
    torch.testing.assert_close(small, straight)
    crossed = score(reward, pictures, [PROMPTS[i] for i in order]).scores["pickscore"]
    assert bool((crossed != straight).any())


def test_pickscore_accepts_plain_tensors_of_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = PickScore(str(folder), str(folder))
    before = score(reward, images(), PROMPTS).scores["pickscore"]
    for name in ("get_image_features", "get_text_features"):
        method = getattr(reward.model, name)
        monkeypatch.setattr(reward.model, name, lambda m=method, **inputs: m(**inputs).pooler_output)
    assert torch.equal(score(reward, images(), PROMPTS).scores["pickscore"], before)


def test_pickscore_of_bad_samples_and_bad_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = PickScore(str(folder), str(folder))
    good = [Sample({"image": image}) for image in images(3)]
    asked = [Request({"prompt": p}) for p in PROMPTS[:3]]
    mixed = checked(reward, [good[0], Sample({}, ok=False), good[2]], asked, torch.zeros(3))
    assert mixed.valid["pickscore"].tolist() == [True, False, True]
    whole = checked(reward, good, asked, torch.zeros(3)).scores["pickscore"]
    torch.testing.assert_close(mixed.scores["pickscore"][[0, 2]], whole[[0, 2]])
    with pytest.raises(UserError, match=r"needs the input 'prompt', the request has \['text'\]"):
        checked(reward, good[:1], [Request({"text": "a"})], torch.zeros(1))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="could not load model 'nowhere/pick'.*local folders") as caught:
        PickScore("nowhere/pick", str(folder))
    assert "\n" not in str(caught.value)


def test_pickscore_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        make_reward("pickscore")


# ---- the registry ----


def brightness(samples: list[Sample], requests: list[Request], gain: float = 1.0) -> list[float | None]:
    values: list[float | None] = [gain * float(s.parts["image"].float().mean()) for s in samples]
    return [None, *values[1:]] if requests[0].inputs.get("prompt") == "skip" else values


def miscounts(samples: list[Sample], requests: list[Request]) -> list[float]:
    return [1.0]


class Incomplete:
    scope = "sample"


def test_names_make_rewards(folder: Path) -> None:
    assert isinstance(make_reward("jpeg", larger=True), JpegSize)
    assert isinstance(make_reward("rewards.jpeg:JpegSize", quality=50), JpegSize)
    assert isinstance(make_reward("pickscore", model=str(folder), processor=str(folder)), PickScore)
    assert all(target.count(":") == 1 for target in REWARDS.values())


def test_a_plain_function_is_a_reward() -> None:
    reward = make_reward(f"{__name__}:brightness", gain=2.0)
    pictures = images(3)
    expected = torch.stack([2 * image.float().mean() for image in pictures])
    torch.testing.assert_close(score(reward, pictures, PROMPTS[:3]).scores["brightness"], expected)
    skipped = score(reward, pictures, ["skip", "a", "b"])
    assert skipped.valid["brightness"].tolist() == [False, True, True]
    samples = [Sample({}, ok=False), *(Sample({"image": image}) for image in pictures[:2])]
    partly = checked(reward, samples, [Request()] * 3, torch.zeros(3))
    torch.testing.assert_close(partly.scores["brightness"][1:], expected[:2])
    nothing = checked(reward, samples[:1], [Request()], torch.zeros(1))
    assert nothing.valid["brightness"].tolist() == [False]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pikscore", {}, "reward 'pikscore' is unknown; did you mean 'pickscore'"),
        ("zzz", {}, "reward 'zzz' is unknown; it takes jpeg, pickscore, scene"),
        ("jpeg", {"qualiti": 3}, "reward 'jpeg' has no option 'qualiti'; did you mean 'quality'"),
        (f"{__name__}:brightness", {"gian": 3}, "has no option 'gian'; did you mean 'gain'"),
        (f"{__name__}:brightness", {"samples": 3}, "has no option 'samples'"),
        ("no_such_module:x", {}, "reward 'no_such_module:x' cannot be imported"),
        ("rewards.jpeg:Nope", {}, "module 'rewards.jpeg' .* has no 'Nope'"),
        ("rewards.jpeg:__name__", {}, "is a str; name a class or a function"),
        (f"{__name__}:Incomplete", {}, "lacks part of the contract"),
    ],
)
def test_wrong_names_and_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_reward(name, **options)


def test_a_function_that_returns_too_few() -> None:
    with pytest.raises(UserError, match="returned 1 scores for 3 samples"):
        score(make_reward(f"{__name__}:miscounts"), images(3), PROMPTS[:3])

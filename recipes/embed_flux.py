"""Train the embedded FLUX: a genuine FluxPipeline folder of a few megabytes, made from scenes rendered here.

    python -m recipes.embed_flux --out modalities/embedded/flux

Stage 1 trains a tiny CLIP and T5 on text alone, so that their outputs spell out the scene a prompt asks for. Stage 2
trains the transformer by rectified flow on latents of a linear autoencoder, and stops while much is left to learn, so
that reinforcement learning has room. Held-out prompts are seen by neither stage.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from modalities.linear_autoencoder import LinearAutoencoder
from rewards.scenes import (
    COLOURS,
    COUNTS,
    RELATIONS,
    SHAPES,
    SIZE,
    TAGS,
    Clause,
    Scene,
    render,
    split,
    verify,
)

TEXT_LENGTH, TEXT_WIDTH = 10, 64
GUIDANCE = 3.5
# Below t = 0.7 the objects can be seen in the noise, so only higher times teach the network to read its prompt; with
# the usual mean of 0 that is a fifth of the samples and pictures are crisp long before they are what was asked for.
T_MEAN = 1.0
EMPTY_SHARE = 0.05  # of captions are empty, so that true guidance has something to push away from
TAG_SHARE = {"single_object": 1, "colors": 1, "counting": 2, "two_object": 1.5, "color_attr": 2, "position": 3}


# ---- text ----------------------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of the grammar, lower-cased, closed by an end token; CLIP and T5 share it."""
    plurals = [Clause(shape, count=2).text.split()[-1] for shape in SHAPES]
    words = [*list(COUNTS.values())[:4], *COLOURS, *SHAPES, *plurals, "and", "left", "right", "of", "above", "below"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_LENGTH,
    )


def build_text_encoders(tokenizer: PreTrainedTokenizerFast) -> tuple[CLIPTextModel, T5EncoderModel]:
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=tokenizer.eos_token_id,
        **ids,
    )
    t5 = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        **ids,
    )
    return CLIPTextModel(clip), T5EncoderModel(t5)


def tokenize(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> Tensor:
    """int64 [B, TEXT_LENGTH]."""
    return tokenizer(prompts, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt").input_ids


LABELS = {
    "count": [None, *range(1, 5)],
    "colour": [None, *COLOURS],
    "shape": [None, *SHAPES],
    "relation": [None, "and", *RELATIONS],
}


def random_text(rng: np.random.Generator) -> Scene:
    """A phrase of a wider grammar than the prompts: any counts, colours and shapes in any combination."""
    colours, relations = (None, *COLOURS), (None, *RELATIONS)
    clauses = tuple(
        Clause(str(rng.choice(SHAPES)), colours[rng.integers(5)], int(rng.integers(1, 5)))
        for _ in range(1 + int(rng.random() < 0.8))
    )
    return Scene("text", clauses, relations[rng.integers(5)] if len(clauses) == 2 else None)


def text_labels(scene: Scene) -> tuple[list[int], list[list[int]]]:
    """Indices into LABELS: of the scene (count, colour, shape of two slots, relation), and of each token (own object's
    count, colour and shape, slot, relation); -100 where a token has no such thing."""
    relation = LABELS["relation"].index(scene.relation or ("and" if len(scene.clauses) == 2 else None))
    slots = [
        [LABELS["count"].index(c.count), LABELS["colour"].index(c.colour), LABELS["shape"].index(c.shape)]
        for c in scene.clauses
    ]
    tokens = []
    for slot, clause in enumerate(scene.clauses):
        if slot:
            tokens += [[-100, -100, -100, -100, relation]] * len((scene.relation or "and").split())
        tokens += [[*slots[slot], slot, relation]] * len(clause.text.split())
    tokens += [[-100] * 5] * (TEXT_LENGTH - len(tokens))
    whole = slots[0] + (slots[1] if len(slots) == 2 else [0, 0, 0]) + [relation]
    return whole, tokens


def train_text(
    tokenizer: PreTrainedTokenizerFast, heldout: list[Scene], steps: int, rng: np.random.Generator
) -> tuple[CLIPTextModel, T5EncoderModel, dict[str, float]]:
    """Train both encoders under linear probes that are then thrown away."""
    clip, t5 = build_text_encoders(tokenizer)
    n_slot = [len(LABELS[name]) for name in ("count", "colour", "shape")]
    n_whole = [*n_slot, *n_slot, len(LABELS["relation"])]
    n_token = [*n_slot, 2, len(LABELS["relation"])]
    clip_probe, t5_probe = nn.Linear(TEXT_WIDTH, sum(n_whole)), nn.Linear(TEXT_WIDTH, sum(n_token))
    parts = nn.ModuleList([clip, t5, clip_probe, t5_probe])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)

    def logits(ids: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pooled = clip(ids).pooler_output
        return clip_probe(pooled).split(n_whole, -1), t5_probe(t5(ids)[0]).split(n_token, -1)

    def batch(scenes: list[Scene]) -> tuple[Tensor, Tensor, Tensor]:
        whole, tokens = zip(*(text_labels(scene) for scene in scenes), strict=True)
        return tokenize(tokenizer, [scene.prompt for scene in scenes]), torch.tensor(whole), torch.tensor(tokens)

    excluded = {scene.prompt for scene in heldout}
    for _ in range(steps):
        scenes = [scene for scene in (random_text(rng) for _ in range(128)) if scene.prompt not in excluded]
        ids, whole, tokens = batch(scenes)
        by_scene, by_token = logits(ids)
        loss = sum(F.cross_entropy(x, whole[:, i]) for i, x in enumerate(by_scene))
        loss = loss + sum(F.cross_entropy(x.flatten(0, 1), tokens[..., i].flatten()) for i, x in enumerate(by_token))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        ids, whole, tokens = batch(heldout)
        by_scene, by_token = logits(ids)
        right = torch.stack([x.argmax(-1) == whole[:, i] for i, x in enumerate(by_scene)]).all(0)
        bound = [(x.argmax(-1) == tokens[..., i])[tokens[..., i] >= 0] for i, x in enumerate(by_token)]
    report = {"clip": right.float().mean().item(), "t5": torch.cat(bound).float().mean().item()}
    return clip.eval().requires_grad_(False), t5.eval().requires_grad_(False), report


# ---- pipeline ------------------------------------------------------------------------------------------------------


def build_transformer(double: int, single: int, heads: int) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 14, 14),
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's settings."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def to_pixels(images: np.ndarray) -> Tensor:
    """uint8 [N, H, W, 3] to float [N, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_latents(vae: LinearAutoencoder, images: np.ndarray) -> Tensor:
    """Scaled latents packed as FLUX packs them, 2x2 to a token: [N, 16, 64]."""
    latents = (vae.encode(to_pixels(images)).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    return FluxPipeline._pack_latents(latents, *latents.shape)


def encode_prompts(pipe: FluxPipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """T5's tokens [N, TEXT_LENGTH, TEXT_WIDTH] and CLIP's pooled vectors [N, TEXT_WIDTH]."""
    with torch.no_grad():
        tokens, pooled, _ = pipe.encode_prompt(prompts, None, max_sequence_length=TEXT_LENGTH)
    return tokens, pooled


# ---- data ----------------------------------------------------------------------------------------------------------


def render_pool(scenes: dict[str, list[Scene]], size: int, rng: np.random.Generator) -> tuple[np.ndarray, list[Scene]]:
    """`size` pictures, uint8 [size, H, W, 3], and their captions."""
    share = np.array([TAG_SHARE[tag] for tag in TAGS])
    tags = rng.choice(TAGS, size=size, p=share / share.sum())
    captions = [scenes[tag][rng.integers(len(scenes[tag]))] for tag in tags]
    return np.stack([render(caption, rng) for caption in captions]), captions


# ---- evaluation ----------------------------------------------------------------------------------------------------


def evaluate(
    pipe: FluxPipeline, scenes: dict[str, list[Scene]], per_tag: int, seed: int = 0, steps: int = 10
) -> tuple[dict[str, float], np.ndarray]:
    """Share of exactly right pictures by tag over `per_tag` samples each, and the pictures [tags, per_tag, H, W, 3]."""
    accuracy, grid = {}, []
    for tag in TAGS:
        chosen = [
            scenes[tag][i * len(scenes[tag]) // per_tag if len(scenes[tag]) > per_tag else i % len(scenes[tag])]
            for i in range(per_tag)
        ]
        tokens, pooled = encode_prompts(pipe, [scene.prompt for scene in chosen])
        images = pipe(
            prompt_embeds=tokens,
            pooled_prompt_embeds=pooled,
            height=SIZE,
            width=SIZE,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images
        pixels = (images * 255).round().astype(np.uint8)
        accuracy[tag] = float(np.mean([verify(image, s)["correct"] for image, s in zip(pixels, chosen, strict=True)]))
        grid.append(pixels)
    accuracy["all"] = float(np.mean([accuracy[tag] for tag in TAGS]))
    return accuracy, np.stack(grid)


def save(pipe: FluxPipeline, out: Path) -> None:
    """Weights in half precision: a few megabytes."""
    transformer = pipe.transformer
    pipe.transformer = copy.deepcopy(transformer).half()
    pipe.save_pretrained(out)
    pipe.transformer = transformer


# ---- training ------------------------------------------------------------------------------------------------------


def flow_loss(
    model: Callable[..., tuple[Tensor]], latents: Tensor, tokens: Tensor, pooled: Tensor, ids: dict[str, Tensor]
) -> Tensor:
    """Rectified flow: velocity noise - data at t from a logit-normal law; latents [B, 16, 64]."""
    noise = torch.randn_like(latents)
    t = torch.sigmoid(T_MEAN + torch.randn(len(latents)))
    noisy = torch.lerp(latents, noise, t[:, None, None])
    velocity = model(
        hidden_states=noisy,
        timestep=t,
        guidance=torch.full_like(t, GUIDANCE),
        pooled_projections=pooled,
        encoder_hidden_states=tokens,
        return_dict=False,
        **ids,
    )[0]
    return F.mse_loss(velocity, noise - latents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2600, help="length of training; the cosine ends here")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--double", type=int, default=2)
    parser.add_argument("--single", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--whitening", type=float, default=0.5)
    parser.add_argument("--pool", type=int, default=60000)
    parser.add_argument("--text-steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=400, help="steps between evaluations and checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "progress.jsonl").open("w")

    def record(**row: object) -> None:
        print(json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    train, heldout = split(0)
    tokenizer = build_tokenizer()
    start = time.monotonic()
    clip, t5, probes = train_text(tokenizer, [s for scenes in heldout.values() for s in scenes], args.text_steps, rng)
    record(stage="text", seconds=round(time.monotonic() - start, 1), **probes)

    start = time.monotonic()
    images, captions = render_pool(train, args.pool, rng)
    vae = LinearAutoencoder.fit(to_pixels(images[:4000]), whitening=args.whitening)
    latents = torch.cat([to_latents(vae, chunk) for chunk in np.array_split(images, max(1, len(images) // 1000))])
    transformer = build_transformer(args.double, args.single, args.heads)
    ema = copy.deepcopy(transformer).eval().requires_grad_(False)
    pipe = FluxPipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer,
        transformer=ema,
    )
    pipe.set_progress_bar_config(disable=True)
    prompts = sorted({scene.prompt for scene in captions})
    table, pooled_table = encode_prompts(pipe, [*prompts, ""])
    row = {prompt: i for i, prompt in enumerate(prompts)}
    caption_rows = torch.tensor([row[scene.prompt] for scene in captions])
    ids = {
        "txt_ids": torch.zeros(TEXT_LENGTH, 3),
        "img_ids": FluxPipeline._prepare_latent_image_ids(1, 4, 4, torch.device("cpu"), torch.float32),
    }
    n_parameters = sum(p.numel() for p in transformer.parameters())
    record(stage="data", seconds=round(time.monotonic() - start, 1), parameters=n_parameters)

    optimizer = torch.optim.AdamW(
        transformer.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    start, losses, step, progress = time.monotonic(), [], 0, 0.0
    while progress < 1:
        warm = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress)))
        picks = torch.randint(len(latents), (args.batch,))
        rows = torch.where(torch.rand(args.batch) < EMPTY_SHARE, len(prompts), caption_rows[picks])
        loss = flow_loss(transformer, latents[picks], table[rows], pooled_table[rows], ids)
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        decay = min(0.999, step / (step + 20))
        torch._foreach_lerp_(list(ema.parameters()), list(transformer.parameters()), 1 - decay)
        losses.append(loss.detach())
        seconds = time.monotonic() - start
        progress = step / args.steps
        if step % args.every == 0 or progress >= 1:
            last = progress >= 1
            accuracy, pictures = evaluate(pipe, heldout, 128 if last else 32)
            mean = torch.stack(losses).mean().item()
            losses.clear()
            record(
                step=step,
                seconds=round(seconds, 1),
                loss=round(mean, 4),
                **{k: round(v, 3) for k, v in accuracy.items()},
            )
            save(pipe, args.out)
            grid = np.concatenate([np.concatenate(list(pictures[i, :16]), axis=1) for i in range(len(TAGS))])
            Image.fromarray(grid).save(args.out / "samples.png")
    accuracy, _ = evaluate(pipe, train, 128)
    record(stage="train prompts", **{k: round(v, 3) for k, v in accuracy.items()})


if __name__ == "__main__":
    main()

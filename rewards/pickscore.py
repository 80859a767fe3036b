"""PickScore (arXiv 2305.01569): a CLIP finetuned on people's choices between pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from core.errors import UserError
from core.rewards import RewardResult, ScoreSpec
from core.types import Request, Sample


class PickScore:
    """Score "pickscore": exp(logit scale) cos(text, image) / ``divisor``, each image with its own prompt only.

    The raw score (divisor 1) of real images is about 19 to 24; Flow-GRPO divides by 26, hence 0.7 to 0.95.
    Weights and scores stay float32: in bfloat16 raw neighbours are 0.125 apart. The image is resized and cropped to
    the centre by PIL, as for the published numbers. model, processor: hub ids or folders.
    """

    scope: Literal["sample"] = "sample"
    needs = frozenset({"image"})

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: torch.device | str = "cpu",
        batch: int = 16,
        divisor: float = 26.0,
    ) -> None:
        try:
            from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel
        except ImportError as error:
            raise UserError(f"pickscore needs transformers ({error}); pip install transformers") from error
        try:
            self.model = CLIPModel.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False).to(device)
            self.tokenizer = AutoTokenizer.from_pretrained(processor)
            self.image_processor = AutoImageProcessor.from_pretrained(processor, backend="pil")
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(
                f"pickscore could not load model '{model}' with processor '{processor}' ({reason}); "
                "give local folders, or check the names and the connection"
            ) from error
        self.device, self.batch, self.divisor = torch.device(device), batch, divisor
        self.scores = (ScoreSpec("pickscore", 15.0 / divisor, 26.0 / divisor),)

    def score(self, samples: Sequence[Sample], requests: Sequence[Request], group: Tensor) -> RewardResult:
        """Raises UserError for a request without a prompt."""
        ok = torch.tensor([sample.ok for sample in samples], dtype=torch.bool)
        scores = torch.full((len(samples),), float("nan"))
        for rows in ok.nonzero().flatten().split(self.batch):
            images, prompts = [], []
            for i in rows.tolist():
                if "prompt" not in requests[i].inputs:
                    raise UserError(f"pickscore needs the input 'prompt', the request has {sorted(requests[i].inputs)}")
                images.append(samples[i].parts["image"])
                prompts.append(requests[i].inputs["prompt"])
            scores[rows] = self._pairs(images, prompts)
        return RewardResult({"pickscore": scores}, {"pickscore": ok})

    @torch.no_grad()
    def _pairs(self, images: list[Tensor], prompts: list[str]) -> Tensor:
        """Matched images, uint8 [H, W, 3] each, and prompts -> float32 [n]."""
        pictures = [Image.fromarray(image.cpu().numpy()) for image in images]
        pixels = self.image_processor(images=pictures, return_tensors="pt").to(self.device)
        # 77 tokens is CLIP's context; a smaller model names its own.
        length = min(77, self.model.config.text_config.max_position_embeddings)
        tokens = self.tokenizer(prompts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        image = _features(self.model.get_image_features(pixel_values=pixels["pixel_values"]))
        text = _features(
            self.model.get_text_features(
                input_ids=tokens["input_ids"].to(self.device), attention_mask=tokens["attention_mask"].to(self.device)
            )
        )
        cosine = torch.nn.functional.cosine_similarity(text.float(), image.float(), dim=-1)
        return (self.model.logit_scale.float().exp() * cosine / self.divisor).cpu()


def _features(out: Any) -> Tensor:
    """transformers 4 returns the projected features, transformers 5 an output object that holds them."""
    return out if isinstance(out, Tensor) else out.pooler_output

"""Time of one V-GRPO iteration over the bare sum of its network calls: same batch, same dtype, same run.

    python -m benchmarks.overhead

An iteration is rollout, decode, score, advantages and update on the embedded FLUX. The bare sum calls the same
transformer with ready-made inputs of the same shapes, as often: forward without gradient for every sampling step,
forward and backward for every surrogate pair. Both are timed alternately and the medians compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import modalities
from core.algorithm import Algorithm
from core.config import TrainerConfig
from core.parameters import make_trainable
from core.rewards import RewardSet
from core.rollout import RolloutConfig
from core.trainer import Trainer
from modalities.flux import FluxAdapter
from recipes.common import quiet_libraries
from recipes.t2i_flux import scene_requests
from rewards import make_reward


def make_trainer(folder: Path, prompts: int, group_size: int, batch: int) -> Trainer:
    adapter = FluxAdapter(modalities.EMBEDDED_FLUX, height=32, width=32, max_sequence_length=10, decode_batch=batch)
    parameters = make_trainable(adapter.modules(), "lora")
    # Every sample counts, so that both sides do the same number of passes: flat groups would be skipped.
    reward = RewardSet([make_reward("jpeg")])
    config = TrainerConfig(
        prompts=prompts, group_size=group_size, micro_batch=batch, rollout=RolloutConfig(n_steps=10, batch=batch)
    )
    return Trainer(adapter, reward, scene_requests(False, 20), [], Algorithm(), parameters, config, folder)


def iteration(trainer: Trainer, number: int) -> float:
    start = time.perf_counter()
    trainer.update(trainer.collect(number))
    return time.perf_counter() - start


def bare(trainer: Trainer, n_steps: int, n_pairs: int, batch: int) -> float:
    """The network calls of one iteration, nothing else."""
    adapter = trainer.adapter
    assert isinstance(adapter, FluxAdapter)
    total = trainer.config.prompts * trainer.config.group_size
    request = trainer.collector.train[0]
    cond = trainer.collector.cache.get([request] * batch)
    inputs = {
        "hidden_states": torch.randn(batch, 16, 64),
        "timestep": torch.rand(batch),
        "guidance": cond.tensors["guidance"],
        "pooled_projections": cond.tensors["pooled"],
        "encoder_hidden_states": cond.tensors["prompt_embeds"],
        "txt_ids": torch.zeros(cond.tensors["prompt_embeds"].shape[1], 3),
        "img_ids": adapter.pipe._prepare_latent_image_ids(1, 4, 4, adapter.device, torch.float32),
        "return_dict": False,
    }
    start = time.perf_counter()
    for _ in range(total // batch):
        with torch.no_grad():
            for _ in range(n_steps):
                adapter.transformer(**inputs)
        for _ in range(n_pairs):
            adapter.transformer(**inputs)[0].sum().backward()
    seconds = time.perf_counter() - start
    for p in trainer.parameters.values():
        p.grad = None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), args.prompts, args.group_size, args.batch)
        trainer.collector.prepare()
        steps, pairs = trainer.config.rollout.n_steps, trainer.algorithm.elbo.n_pairs
        iteration(trainer, 0), bare(trainer, steps, pairs, args.batch)  # warm up
        ours, theirs = [], []
        for k in range(args.repeats):
            ours.append(iteration(trainer, k + 1))
            theirs.append(bare(trainer, steps, pairs, args.batch))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"iteration {a:.2f} s, bare network calls {b:.2f} s, ratio {a / b:.3f} (target <= 1.10)")


if __name__ == "__main__":
    main()

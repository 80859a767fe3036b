"""What every recipe does around the trainer: configuration, run folder, progress, pictures, weights, report."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from core.adapter import Adapter
from core.algorithm import Algorithm
from core.checkpoint import write_atomic
from core.config import TrainerConfig
from core.distributed import from_main
from core.doctor import examine
from core.errors import UserError
from core.metrics import read
from core.parameters import make_trainable
from core.rewards import RewardResult, RewardSet
from core.trainer import Hooks, Trainer
from core.types import Request, Sample
from recipes.grids import image_grid, save_png
from recipes.report import write_report
from recipes.schema import build, schema
from rewards import make_reward

console = Console()
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "hydra-core", "safetensors", "numpy")


@dataclass
class RewardConfig:
    """names: rewards of ``rewards.REWARDS`` or package.module:Name. options: reward name -> constructor options."""

    names: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TuneConfig:
    """mode: lora or full. rank, alpha, targets: of LoRA; targets are suffixes of layer names."""

    mode: str = "lora"
    rank: int = 32
    alpha: int = 64
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])


@dataclass
class ReportConfig:
    """main_score: whose held-out value the report leads with. pictures: held-out samples drawn at every evaluation.
    trackers: accelerate's ``log_with`` names (tensorboard, wandb ...)."""

    main_score: str | None = None
    pictures: int = 30
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])


@dataclass
class RecipeConfig:
    """What all recipes share; a recipe adds ``model`` and ``data``. threads: torch's CPU threads, null = default."""

    run: str = "train"
    resume: str | None = None
    output: str | None = None
    threads: int | None = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: schema(Algorithm) = field(default_factory=schema(Algorithm))  # type: ignore[valid-type]
    train: schema(TrainerConfig) = field(default_factory=schema(TrainerConfig))  # type: ignore[valid-type]
    tune: TuneConfig = field(default_factory=TuneConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


CHANGEABLE = ("train.iterations", "train.keep", "train.checkpoint_every", "train.micro_batch", "threads")


def resumed_config(config: DictConfig) -> DictConfig:
    """The stopped run's configuration with the few changes that do not make it another run."""
    folder = Path(config.resume)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"resume={folder} is not a run folder (it has no config.yaml); give outputs/<recipe>/<time>")
    stored = OmegaConf.merge(config, OmegaConf.load(folder / "config.yaml"))
    assert isinstance(stored, DictConfig)
    for override in HydraConfig.get().overrides.task:
        key, _, value = override.partition("=")
        if key in CHANGEABLE or key.startswith("report."):
            OmegaConf.update(stored, key, OmegaConf.create(f"x: {value}").x)
        elif key not in ("resume", "run"):
            raise UserError(f"{key} cannot change in a resumed run; only {', '.join(CHANGEABLE)} and report.* can")
    stored.resume, stored.output, stored.run = str(folder), str(folder), config.run
    return stored


def environment() -> dict[str, Any]:
    """Where the numbers come from: command, commit, versions."""

    def git(*command: str) -> str | None:
        try:
            root = Path(__file__).parent
            return subprocess.run(
                ["git", "-C", root, *command], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    dirty = git("status", "--porcelain")
    return {
        "command": " ".join(["python -m", _module_name(), *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": None if dirty is None else bool(dirty),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": versions,
    }


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def read_prompts(path: str) -> list[Request]:
    """A text file, one prompt a line; or .jsonl, an object a line with "prompt", optional "geometry" and anything else
    as meta. Raises UserError naming file and line."""
    file = Path(path)
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompt file '{path}' cannot be read ({error}); give a UTF-8 text file, one prompt a line"
        ) from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        if file.suffix != ".jsonl":
            requests.append(Request({"prompt": line}))
            continue
        try:
            row = json.loads(line)
            requests.append(Request({"prompt": row.pop("prompt")}, row.pop("geometry", {}), row))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f'{path} line {number} is not a JSON object with a "prompt" ({error}); mend that line'
            ) from error
    if not requests:
        raise UserError(f"the prompt file '{path}' has no prompt; write one a line")
    return requests


def make_rewards(config: DictConfig) -> RewardSet:
    for name in config.options:
        if name not in config.names:
            raise UserError(f"reward.options names '{name}', which is not in reward.names {list(config.names)}")
    options = OmegaConf.to_container(config.options, resolve=True)
    return RewardSet([make_reward(name, **options.get(name, {})) for name in config.names])  # type: ignore[union-attr, arg-type]


def check_space(folder: Path, parameters: Mapping[str, torch.nn.Parameter], keep: int) -> None:
    """Refuse to start where the checkpoints cannot fit: weights, two Adam moments and an EMA, keep + 1 of them."""
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    need, free = 4 * size * (keep + 1), shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"checkpoints need about {need / 2**20:.0f} MiB and {folder} has {free / 2**20:.0f} MiB free; "
            "free some space, set output= to another disk, or lower train.keep"
        )


def quiet_libraries() -> None:
    """diffusers and transformers draw progress bars of their own, and warn of our autoencoder's class."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


class Screen:
    """Progress on the terminal: iteration bar with reward and ETA, and the phase below it."""

    def __init__(self, iterations: int, score: str) -> None:
        self.score = score
        self.progress = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.whole = self.progress.add_task("iteration", total=iterations, note="")
        self.part = self.progress.add_task("rollout", total=None, note="samples")

    def phase(self, name: str, done: int, total: int) -> None:
        self.progress.update(self.part, description=name, completed=done, total=total)

    def iteration(self, number: int, metrics: Mapping[str, float]) -> None:
        reward, held = metrics.get(f"reward/{self.score}/mean"), metrics.get(f"eval/{self.score}")
        note = "" if reward is None else f"reward {reward:.3f}"
        self.progress.update(self.whole, completed=number, note=note)
        if held is not None:
            console.print(f"iteration {number:4d}  held-out {self.score} {held:.3f}")


def launch(
    config: DictConfig,
    make_adapter: Callable[[DictConfig, torch.device], Adapter],
    make_requests: Callable[[DictConfig], tuple[list[Request], list[Request]]],
) -> None:
    """Run a recipe: train, resume, or doctor."""
    quiet_libraries()
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    if config.run not in ("train", "doctor"):
        raise UserError(f"run={config.run} is unknown; use run=train or run=doctor")
    if config.resume is not None:
        config = resumed_config(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Everything that can be wrong in the configuration is found before a network is loaded.
    algorithm, settings = build(Algorithm, config.algorithm), build(TrainerConfig, config.train)
    reward = make_rewards(config.reward)
    algorithm.advantage.weight_of(reward.scores)
    train, held_out = make_requests(config)
    reward.check([*train, *held_out])
    main_score = config.report.main_score or reward.scores[0].name
    if main_score not in [spec.name for spec in reward.scores]:
        raise UserError(f"report.main_score '{main_score}' is no score of {config.reward.names}")

    folder = Path(
        config.output or Path("outputs") / _module_name().rsplit(".", 1)[-1] / time.strftime("%Y-%m-%d_%H-%M-%S")
    )
    accelerator = Accelerator(
        cpu=config.model.device == "cpu", log_with=list(config.report.trackers) or None, project_dir=folder
    )
    folder = Path(from_main(accelerator, str(folder)))
    if config.resume is None and (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} already holds a run; go on with resume={folder}, or choose another output=")
    adapter = make_adapter(config, accelerator.device)
    torch.manual_seed(settings.seed)  # LoRA's initial weights
    parameters = make_trainable(
        adapter.modules(),
        config.tune.mode,
        rank=config.tune.rank,
        alpha=config.tune.alpha,
        targets=list(config.tune.targets),
    )
    if config.run == "doctor":
        report = examine(adapter, reward, train, algorithm, parameters, settings)
        for check in report:
            mark = "[green]ok  [/]" if check.ok else "[red]FAIL[/]"
            console.print(f"{mark} [bold]{check.name}[/]: {check.message}", highlight=False)
        if not all(check.ok for check in report):
            raise SystemExit(1)
        return
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, parameters, settings.keep)
    if accelerator.is_main_process:
        config.output = str(folder)
        config.report.main_score = main_score
        stored = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        stored.run, stored.resume = "train", None
        write_atomic(folder / "config.yaml", OmegaConf.to_yaml(stored))
        write_atomic(folder / "environment.json", json.dumps(environment(), indent=1))
        console.print(f"run folder {folder}")
    _train(config, settings, algorithm, reward, adapter, parameters, train, held_out, accelerator, folder, main_score)


def _train(
    config: DictConfig,
    settings: TrainerConfig,
    algorithm: Algorithm,
    reward: RewardSet,
    adapter: Adapter,
    parameters: Mapping[str, torch.nn.Parameter],
    train: Sequence[Request],
    held_out: Sequence[Request],
    accelerator: Accelerator,
    folder: Path,
    main_score: str,
) -> None:
    screen = Screen(settings.iterations, main_score)
    # One picture for every few held-out requests, spread evenly, so that every tag is seen.
    shown = torch.linspace(0, len(held_out) - 1, min(config.report.pictures, len(held_out))).long().unique().tolist()

    def on_iteration(number: int, metrics: dict[str, float], timings: dict[str, float]) -> None:
        screen.iteration(number, metrics)
        accelerator.log({k: v for k, v in (metrics | timings).items() if v == v}, step=number)

    def on_evaluation(
        number: int, samples: Sequence[Sample], requests: Sequence[Request], result: RewardResult
    ) -> None:
        binary = [n for n, s in result.scores.items() if bool(((s == 0) | (s == 1))[result.valid[n]].all())]
        verdict = result.scores[binary[0]] if binary else None
        save_png(
            image_grid(
                [samples[i].parts.get("image") for i in shown],
                [str(requests[i].inputs.get("prompt", "")) for i in shown],
                [None if verdict is None else bool(verdict[i] == 1) for i in shown],
                columns=5,
            ),
            folder / "samples" / f"iteration_{number:06d}.png",
        )

    hooks = Hooks(screen.phase, on_iteration, on_evaluation)
    trainer = Trainer(
        adapter, reward, train, held_out, algorithm, parameters, settings, folder, accelerator,
        cache=Path(os.environ.get("VGRPO_CACHE", "outputs/cache")), hooks=hooks,
    )  # fmt: skip
    if config.report.trackers:
        accelerator.init_trackers("tensorboard")
    with screen.progress if accelerator.is_main_process else nullcontext():
        trainer.fit(resume=config.resume is not None)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    with trainer.final_weights():
        adapter.export(folder / "weights")
    page = write_report(folder)
    rows = [row for row in read(folder / "metrics.jsonl") if row.get(f"eval/{main_score}") is not None]
    if rows:
        first, last = rows[0], rows[-1]
        before, after = first[f"eval/{main_score}"], last[f"eval/{main_score}"]
        console.print(
            f"held-out {main_score}: {before:.3f} before, {after:.3f} after "
            f"{last['iteration']:.0f} iterations ({after - before:+.3f})"
        )
    if trainer.counters.iteration < settings.iterations:
        console.print(f"stopped at iteration {trainer.counters.iteration}; go on with resume={folder}")
    console.print(f"report {page}\nweights {folder / 'weights'}", highlight=False)

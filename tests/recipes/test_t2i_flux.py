"""The recipe as a user runs it, on the embedded pipeline with a very small budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from core.errors import UserError
from core.metrics import read
from recipes import cli, t2i_flux

ROOT = Path(__file__).parents[2]
SMALL = [
    "threads=1", "train.prompts=2", "train.group_size=4", "train.micro_batch=8", "train.rollout.batch=8",
    "train.rollout.n_steps=4", "data.eval_size=6", "train.eval_every=1", "train.checkpoint_every=1",
    "report.pictures=6",
    "tune.mode=lora",
]  # fmt: skip


def recipe(cwd: Path, *overrides: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.t2i_flux", *overrides],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    done = recipe(folder, *SMALL, "train.iterations=2", "output=run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "report" in done.stdout
    assert "before" in done.stdout
    return folder / "run"


def test_run_folder_is_complete(run: Path) -> None:
    rows = read(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for key in (
        "reward/scene/mean", "reward/scene/std", "reward/scene/valid_fraction", "group/zero_std_fraction",
        "policy/grad_norm", "nfe/rollout", "nfe/update", "nfe/total", "eval/scene_correct", "model/velocity_norm_ratio",
    ):  # fmt: skip
        assert key in rows[-1], key
    assert rows[1]["nfe/rollout"] == 2 * 4 * 4
    assert {"seconds/rollout", "seconds/update", "memory/peak_mb"} <= read(run / "timings.jsonl")[1].keys()
    assert "train:" in (run / "config.yaml").read_text()
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__.split("+")[0]
    assert len(list((run / "samples").glob("*.png"))) == 3
    assert (run / "report.html").stat().st_size > 10_000
    assert list(run.glob("**/events.out.tfevents*"))


def test_weights_load_into_the_pipeline(run: Path) -> None:
    from diffusers import FluxPipeline

    import modalities.linear_autoencoder  # the embedded pipeline's own component

    pipe = FluxPipeline.from_pretrained(modalities.EMBEDDED_FLUX)
    pipe.load_lora_weights(run / "weights")
    assert pipe.get_list_adapters()["transformer"]
    image = pipe("a red circle", height=32, width=32, num_inference_steps=2, max_sequence_length=10).images[0]
    assert image.size == (32, 32)


def test_resume_goes_on_and_equals_one_run(run: Path, tmp_path: Path) -> None:
    assert recipe(tmp_path, *SMALL, "train.iterations=1", "output=parts").returncode == 0
    # One iteration less than `run`, then the same settings on to the same end.
    done = recipe(tmp_path, "resume=parts", "train.iterations=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "parts" / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


def test_doctor(tmp_path: Path) -> None:
    done = recipe(tmp_path, *SMALL, "run=doctor", "train.rollout.n_steps=10", "train.group_size=8")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for name in (
        "zero noise",
        "ratio is 1",
        "scores spread",
        "reward follows",
        "gradient reaches",
        "checkpoint",
        "memory",
    ):
        assert name in done.stdout, name
    assert not (tmp_path / "outputs" / "t2i_flux").exists()


def test_help_is_readable(tmp_path: Path) -> None:
    done = recipe(tmp_path, "--help")
    assert done.returncode == 0
    assert "What most people change" in done.stdout
    assert "learning_rate: " in done.stdout


BAD = {
    "mistyped key": (["train.lerning_rate=1e-3"], ("lerning_rate", "did you mean 'train.learning_rate'")),
    "mistyped group": (["algorithm=vgrpoo"], ("vgrpoo", "did you mean 'vgrpo'")),
    "wrong type": (["train.iterations=many"], ("many", "iterations")),
    "missing model path": (["model.path=./no/such/folder"], ("no/such/folder",)),
    "missing prompt file": (["data.prompts=nothing.txt"], ("nothing.txt", "one prompt a line")),
    "empty prompt file": (["data.prompts=empty.txt"], ("empty.txt", "no prompt")),
    "broken jsonl": (["data.prompts=broken.jsonl"], ("broken.jsonl line 2",)),
    "foreign prompts for the scene reward": (["data.prompts=other.txt"], ("a photo of a dog",)),
    "group size 1": (["train.group_size=1"], ("group_size is 1", "2")),
    "zero prompts": (["train.prompts=0"], ("train.prompts is 0",)),
    "unknown reward": (["reward.names=[scen]"], ("scen", "did you mean 'scene'")),
    "unknown reward option": (["+reward.options.scene.wieght=1"], ("'wieght'", "has no option")),
    "no reward": (["reward.names=[]"], ("no reward",)),
    "NaN reward": (["reward.names=[nan_reward:score]", "report.main_score=score"], ("'score'", "not finite")),
    "illegal resolution": (["model.height=30"], ("height 30", "32")),
    "more pairs than steps": (["algorithm.elbo.n_pairs=5"], ("5 pairs", "n_pairs <= 4")),
    "inert clip": (["algorithm.clip=0.01"], ("clip", "updates=2")),
    "lora nowhere": (["tune.targets=[nowhere]"], ("nowhere",)),
    "resume nothing": (["resume=nowhere"], ("nowhere", "not a run folder")),
    "unknown weight": (["+algorithm.advantage.weights.scenes=1.0"], ("scenes", "did you mean 'scene'")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_work(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, parts = BAD[case]
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a circle"}\n{"prompt": \n')
    (tmp_path / "other.txt").write_text("a photo of a dog\n")
    (tmp_path / "nan_reward.py").write_text("def score(samples, requests):\n    return [float('nan')] * len(samples)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # the test process's own setting is not ours
    small = [o for o in SMALL if o.split("=")[0] not in {x.split("=")[0] for x in overrides}]
    cli.register("t2i_flux", t2i_flux.Config)
    with pytest.raises((UserError, HydraException)) as caught:
        cli.check_overrides("t2i_flux", [*small, *overrides])
        with initialize_config_dir(str(cli.CONF), version_base=None):
            config = compose("t2i_flux", [*small, *overrides])
        t2i_flux.main(config)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert not list(tmp_path.glob("outputs/**/checkpoints"))


@pytest.mark.parametrize("overrides", [["train.lerning_rate=1e-3"], ["train.iterations=many"], ["train.group_size=1"]])
def test_an_error_is_one_line_and_status_2(overrides: list[str], tmp_path: Path) -> None:
    done = recipe(tmp_path, *overrides)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_disk_full_while_saving_loses_nothing(tmp_path: Path) -> None:
    """A quota on file size stands for the full disk; the run before it stays whole and resumable."""
    assert recipe(tmp_path, *SMALL, "train.iterations=1", "output=run").returncode == 0
    before = sorted((p.name, p.stat().st_size) for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file())
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, safetensors.torch as s\n"
        "def full(*a, **k): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "import core.checkpoint\ncore.checkpoint.save_file = full\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = recipe(tmp_path, "resume=run", "train.iterations=2", env=env)
    assert done.returncode == 2
    assert "no space left while saving" in done.stderr
    assert "iteration_000001" in done.stderr
    after = sorted((p.name, p.stat().st_size) for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file())
    assert before == after
    assert recipe(tmp_path, "resume=run", "train.iterations=2").returncode == 0

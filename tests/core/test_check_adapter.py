"""The conformance suite has to be able to fail: adapters broken in one way each, and the sentence each one gets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from core.adapter import Adapter, Layout
from core.processes import EDM, Process, RectifiedFlow, VariancePreserving
from core.schedules import linear_grid
from core.streams import StreamSpec
from core.testing import CHECKS, check_adapter, conformance
from core.types import Conditioning, Noise, Predictions, Request, Sample, State
from tests.toys.molecule import MoleculeAdapter
from tests.toys.molecule import make_requests as molecules
from tests.toys.pretrain import clean_latents, pretrain
from tests.toys.sequence import SequenceAdapter, data, make_requests
from tests.toys.torus import TorusAdapter

REQUESTS = make_requests(3, 5)


def rejects(adapter: Adapter, sentence: str, requests: Sequence[Request] = REQUESTS) -> None:
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_adapter(adapter, requests)
    assert type(adapter).__name__ in str(caught.value)


# ---- noise ----


def test_draw_that_ignores_its_generators() -> None:
    class Broken(SequenceAdapter):
        def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
            return {k: torch.randn_like(x) for k, x in super().draw(cond, generators).items()}

    rejects(Broken(), "stream 'level': draw gives other noise for the same generators")


def test_draw_with_a_fixed_seed() -> None:
    class Broken(SequenceAdapter):
        def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
            return super().draw(cond, [torch.Generator().manual_seed(0) for _ in generators])

    rejects(Broken(), "two samples with different generators get the same noise")


def test_draw_with_one_generator_for_the_batch() -> None:
    class Broken(SequenceAdapter):
        def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
            return super().draw(cond, [generators[0]] * len(generators))

    rejects(Broken(), "equal generators give different noise within one batch")


def test_draw_at_the_padded_size() -> None:
    class Broken(MoleculeAdapter):
        def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
            n = max(g["n_atoms"] for g in cond.geometry)
            return super().draw(Conditioning({}, tuple({"n_atoms": n} for _ in cond.geometry)), generators)

    rejects(Broken(), "a sample's noise changes with the batch it is drawn in", molecules(4, 1))


def test_noise_with_a_centre_of_mass() -> None:
    class Broken(MoleculeAdapter):
        def draw(self, cond: Conditioning, generators: Sequence[torch.Generator]) -> Noise:
            return {k: x + 1 if k == "positions" else x for k, x in super().draw(cond, generators).items()}

    rejects(Broken(), "stream 'positions': draw has a centre of mass", molecules(4, 1))


# ---- the path ----


def test_perturb_with_time_turned_round() -> None:
    class Broken(SequenceAdapter):
        def perturb(self, clean: State, noise: Noise, t: Tensor, cond: Conditioning) -> State:
            return super().perturb(clean, noise, 1 - t, cond)

    rejects(Broken(), "perturb at t = 0 is not the clean value")


def test_perturb_on_another_path() -> None:
    class Broken(SequenceAdapter):
        def perturb(self, clean: State, noise: Noise, t: Tensor, cond: Conditioning) -> State:
            return super().perturb(clean, noise, t * t, cond)

    rejects(Broken(), "a perfect prediction at t = 0.2 has loss .* perturb does not follow the declared process")


def test_perturb_on_another_path_of_the_torus() -> None:
    class Broken(TorusAdapter):
        def perturb(self, clean: State, noise: Noise, t: Tensor, cond: Conditioning) -> State:
            return super().perturb(clean, noise, t * t, cond)

    requests = [Request({"kind": 0}, {"angles": n}) for n in (3, 5)]
    rejects(
        Broken(), "a perfect prediction at t = 0.2 has loss .* does not follow the declared process Torus", requests
    )


def test_prior_of_another_scale() -> None:
    class Broken(SequenceAdapter):
        def prior(self, noise: Noise, cond: Conditioning) -> State:
            return super().prior({k: 2 * x for k, x in noise.items()}, cond)

    rejects(Broken(), "perturb at t = 1 is not the prior of the same noise")


def test_given_sites_that_are_noised() -> None:
    class Broken(SequenceAdapter):
        def perturb(self, clean: State, noise: Noise, t: Tensor, cond: Conditioning) -> State:
            f, spec = clean["level"], self.streams[0]
            return {"level": f.with_value(spec.process.perturb(f.value, noise["level"], t))}

    rejects(Broken(), "perturb changes sites that are not acted")


def test_grid_from_data_to_noise() -> None:
    class Broken(SequenceAdapter):
        def grid(self, n_steps: int, cond: Conditioning) -> Tensor:
            return linear_grid(n_steps).flip(0)

    rejects(Broken(), r"grid\(8\) must be 9 float32 times that fall strictly")


# ---- the network ----


def test_dropout_in_train_mode() -> None:
    class Broken(SequenceAdapter):
        def __init__(self) -> None:
            super().__init__()
            self.network.inner.append(nn.Dropout(0.1))

    rejects(Broken(), "the same loss computed twice without an update differs")


def test_padding_that_leaks() -> None:
    class Broken(SequenceAdapter):
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            out = super().predict(noisy, t, cond, branch)["level"]
            return {"level": out - out.mean(1, keepdim=True)}

    rejects(Broken(), "padded sites leak into real ones")


def test_samples_that_influence_each_other() -> None:
    class Broken(SequenceAdapter):
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            out = super().predict(noisy, t, cond, branch)["level"]
            return {"level": out - out.mean(0, keepdim=True)}

    rejects(Broken(), "micro-batches give other losses than the whole batch")


def test_predict_that_writes_into_its_input() -> None:
    class Broken(SequenceAdapter):
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            noisy["level"].value.mul_(0.9)
            return super().predict(noisy, t, cond, branch)

    rejects(Broken(), "predict changes the noisy state in place")


def test_prediction_of_another_shape() -> None:
    class Broken(MoleculeAdapter):
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            out = super().predict(noisy, t, cond, branch)
            return out | {"types": nn.functional.pad(out["types"], (0, 1))}

    rejects(Broken(), r"stream 'types': predict \(branch cond\) returns shape", molecules(4, 1))


def test_prediction_of_nan() -> None:
    class Broken(SequenceAdapter):
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            return {"level": super().predict(noisy, t, cond, branch)["level"] / 0}

    rejects(Broken(), "four Euler steps give NaN or infinity")


def test_no_gradient() -> None:
    class Broken(SequenceAdapter):
        @torch.no_grad()
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            return super().predict(noisy, t, cond, branch)

    rejects(Broken(), "the loss does not reach a parameter of modules")


def test_network_missing_from_modules() -> None:
    class Broken(SequenceAdapter):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            return {"level": self.head(super().predict(noisy, t, cond, branch)["level"])}

    rejects(Broken(), r"the loss has a gradient in 2 tensor\(s\) outside modules")


def test_other_network_in_modules() -> None:
    class Broken(SequenceAdapter):
        def modules(self) -> dict[str, nn.Module]:
            return {"network": nn.Linear(1, 1)}

    rejects(Broken(), "the loss does not reach a parameter of modules")


# ---- conventions, on a trained network ----


@pytest.fixture(scope="module")
def trained() -> SequenceAdapter:
    torch.set_num_threads(1)
    adapter = SequenceAdapter()
    pretrain(adapter, make_requests(32, 0), data, steps=200)
    check_adapter(adapter, REQUESTS, data=clean_latents(adapter, REQUESTS, data, 1))
    return adapter


@pytest.mark.parametrize(
    ("sign", "flip", "sentence"),
    [
        (-1, False, "with the opposite sign"),
        (1, True, "with 1 - t for t"),
        (-1, True, "with the opposite sign and 1 - t"),
    ],
)
def test_wrong_conventions(trained: SequenceAdapter, sign: int, flip: bool, sentence: str) -> None:
    class Broken(SequenceAdapter):
        def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
            return {"level": sign * trained.predict(noisy, 1 - t if flip else t, cond, branch)["level"]}

        def modules(self) -> dict[str, nn.Module]:
            return dict(trained.modules())

    with pytest.raises(AssertionError, match=f"the network denoises better {sentence}"):
        check_adapter(Broken(), REQUESTS, data=clean_latents(trained, REQUESTS, data, 1))


# ---- encoding and decoding ----


def test_encode_that_changes_the_geometry() -> None:
    class Broken(SequenceAdapter):
        def encode(self, requests: Sequence[Request]) -> Conditioning:
            cond = super().encode(requests)
            return Conditioning(cond.tensors, tuple({**g, "extra": 1} for g in cond.geometry))

    rejects(Broken(), "encode turned the geometry")


def test_encode_that_reads_meta() -> None:
    class Broken(SequenceAdapter):
        def encode(self, requests: Sequence[Request]) -> Conditioning:
            cond = super().encode(requests)
            extra = torch.tensor([float(r.meta.get("level", 0)) for r in requests])
            return Conditioning({**cond.tensors, "extra": extra}, cond.geometry)

    rejects(Broken(), "it reads meta", [Request(r.inputs, r.geometry, {"level": 1}) for r in REQUESTS])


def test_encode_that_depends_on_the_company() -> None:
    class Broken(TorusAdapter):
        def encode(self, requests: Sequence[Request]) -> Conditioning:
            cond = super().encode(requests)
            kind = cond.tensors["kind"]
            return Conditioning({"kind": kind - kind.min()}, cond.geometry)

    requests = [Request({"kind": k}, {"angles": 2 + k}) for k in (1, 0, 2)]
    rejects(Broken(), "encode depends on the company", requests)


def test_layout_that_does_not_cut_what_was_padded_in_other_company() -> None:
    class Broken(SequenceAdapter):
        def layout(self, cond: Conditioning) -> dict[str, Layout]:
            layout, prefix = super().layout(cond)["level"], cond.tensors["prefix"]
            given = nn.functional.pad(prefix, (0, max(0, layout.padded[0] - prefix.shape[1])))[..., None]
            return {"level": Layout(layout.sites, layout.event, acted=layout.acted, given=given)}

    requests = [Request({"prefix": [0.5] * n}, {"length": n + 2}) for n in (1, 6)]
    rejects(Broken(), r"\[conditioning\]", requests)


def test_decode_that_raises() -> None:
    class Broken(SequenceAdapter):
        def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
            if not torch.isfinite(clean["level"].value).all():
                raise ValueError("cannot decode")
            return super().decode(clean, cond)

    rejects(Broken(), r"decode raises ValueError on NaN \(cannot decode\)")


def test_decode_that_calls_anything_ok() -> None:
    class Broken(MoleculeAdapter):
        def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
            return [Sample(s.parts, ok=True) for s in super().decode(clean, cond)]

    rejects(Broken(), "stream 'positions': decode calls a sample of NaN ok", molecules(4, 1))


def test_decode_that_lets_one_sample_spoil_the_others() -> None:
    class Broken(SequenceAdapter):
        def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
            samples = super().decode(clean, cond)
            return samples if all(s.ok for s in samples) else [Sample({}, ok=False) for _ in samples]

    rejects(Broken(), "one sample of NaN changes whether the others decode")


def test_decode_that_keeps_the_padding() -> None:
    class Broken(SequenceAdapter):
        def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
            return [Sample({"level": x}, ok=bool(x.isfinite().all())) for x in clean["level"].value[..., 0]]

    rejects(Broken(), "cut padding off in decode")


# ---- no false alarms, and no traces ----


class Plain(Adapter):
    """A random network on any process and prediction."""

    def __init__(self, process: Process, prediction: str) -> None:
        self.streams = (StreamSpec("x", process, prediction, ("site",), ("channel",)),)
        self.network = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Dropout(0.0), nn.Linear(16, 2))

    def encode(self, requests: Sequence[Request]) -> Conditioning:
        return Conditioning({}, tuple(dict(r.geometry) for r in requests))

    def layout(self, cond: Conditioning) -> dict[str, Layout]:
        return {"x": Layout([(g["n"],) for g in cond.geometry], (2,))}

    def grid(self, n_steps: int, cond: Conditioning) -> Tensor:
        informative = self.streams[0].prediction not in ("eps", "score")
        return linear_grid(n_steps) * (1.0 if informative else 0.99)

    def predict(self, noisy: State, t: Tensor, cond: Conditioning, branch: str = "cond") -> Predictions:
        x = noisy["x"].value
        return {"x": self.network(torch.cat([x, t[:, None, None].expand(*x.shape[:2], 1)], dim=-1))}

    def decode(self, clean: State, cond: Conditioning) -> list[Sample]:
        parts = [x[: g["n"]] for x, g in zip(clean["x"].value, cond.geometry, strict=True)]
        return [Sample({"x": x}, ok=bool(x.isfinite().all())) for x in parts]

    def modules(self) -> dict[str, nn.Module]:
        return {"network": self.network}


PROCESSES = [RectifiedFlow(), VariancePreserving("cosine"), VariancePreserving("linear"), EDM()]


@pytest.mark.parametrize(
    ("process", "prediction"), [(process, kind) for process in PROCESSES for kind in sorted(process.predictions)]
)
def test_every_process_and_prediction_passes(process: Process, prediction: str) -> None:
    torch.manual_seed(0)
    adapter = Plain(process, prediction)
    check_adapter(adapter, [Request(geometry={"n": n}) for n in (2, 4)])


def test_a_grid_that_starts_where_the_prediction_says_nothing() -> None:
    class Broken(Plain):
        def grid(self, n_steps: int, cond: Conditioning) -> Tensor:
            return linear_grid(n_steps)

    rejects(Broken(RectifiedFlow(), "eps"), "start the grid below 1", [Request(geometry={"n": n}) for n in (2, 4)])


def test_the_adapter_is_left_as_it_was_found() -> None:
    adapter = SequenceAdapter()
    adapter.network.train()
    adapter.network.outer.eval()
    adapter.network.requires_grad_(False)
    random = torch.get_rng_state()
    check_adapter(adapter, REQUESTS)
    assert adapter.network.training
    assert not adapter.network.outer.training
    assert all(not p.requires_grad and p.grad is None for p in adapter.network.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_one_request_is_too_few() -> None:
    rejects(SequenceAdapter(), "give check_adapter two requests or more", REQUESTS[:1])


def test_conformance_lists_every_check() -> None:
    checks = conformance(SequenceAdapter(), REQUESTS)
    assert [check.name for check in checks[1:]] == [check.__name__.removeprefix("_check_") for check in CHECKS]
    assert all(check.ok and not check.message for check in checks)

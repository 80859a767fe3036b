"""Forward (corruption) processes, and the one table between velocity, x0, eps, v and score.

A process is an interface (:class:`Process`) or a leaf of it. Time is canonical: t = 0 data, t = 1 prior.
A Gaussian path is ``x_t = a(t) x0 + s(t) eps``; every prediction type is a linear combination of x_t, x0 and eps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.errors import UserError


def expand(t: Tensor, like: Tensor) -> Tensor:
    """t [B] -> [B, 1, ..., 1] with the rank of ``like``; scalars stay scalars."""
    return t.reshape(t.shape + (1,) * (like.ndim - t.ndim)) if t.ndim else t


class Coefficients(NamedTuple):
    """A path at one time: a, s and their time derivatives, broadcastable to the value."""

    a: Tensor
    s: Tensor
    da: Tensor
    ds: Tensor


class Process(ABC):
    """How clean data becomes noise, and one deterministic step back."""

    predictions: frozenset[str]  # what a network may output for this process
    spaces: frozenset[str]  # where a surrogate may compare
    continuous: bool  # has a derivative, so higher-order solvers apply

    @abstractmethod
    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Base randomness for one sample of this shape (sites, event), on the generator's device."""

    @abstractmethod
    def prior(self, noise: Tensor) -> Tensor:
        """The value at t = 1 for this noise."""

    @abstractmethod
    def perturb(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The noisy value at t [B]; deterministic given the noise."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, t: Tensor, prediction: str) -> Tensor:
        """What a perfect network of this prediction type outputs."""

    @abstractmethod
    def denoise(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        """The estimate of the clean value (class probabilities for categories)."""

    @abstractmethod
    def step(self, noisy: Tensor, output: Tensor, t: Tensor, t_next: Tensor, prediction: str, noise: Tensor) -> Tensor:
        """First-order step from t to t_next, both [B] or scalar; deterministic given the base noise."""

    @abstractmethod
    def errors(
        self, output: Tensor, clean: Tensor, noise: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str
    ) -> tuple[Tensor, Tensor | None]:
        """Elementwise denoising loss and, where self-normalisation is defined, the elementwise absolute error."""

    @abstractmethod
    def distance(self, output: Tensor, other: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str) -> Tensor:
        """Elementwise divergence of two networks' outputs at the same noisy value."""

    def derivative(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        raise UserError(f"{type(self).__name__} has no ODE; use the euler sampler for this stream")

    def clock(self, t: Tensor) -> Tensor:
        """The variable that :meth:`derivative` differentiates by."""
        return t

    def move(self, value: Tensor, delta: Tensor) -> Tensor:
        return value + delta

    def difference(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise a - b, the shortest one where values are periodic; 0 = equal, 1 = unequal for categories."""
        return a - b


class Gaussian(Process):
    """Interface of the processes x_t = a x0 + s eps; a leaf gives :meth:`coefficients`."""

    predictions = frozenset({"velocity", "velocity_reversed", "x0", "eps", "v", "score"})
    spaces = frozenset({"x0", "velocity", "eps"})
    continuous = True

    @abstractmethod
    def coefficients(self, t: Tensor) -> Coefficients:
        """a, s, da/dt, ds/dt at t, float32, same shape as t."""

    def at(self, t: Tensor, like: Tensor) -> Coefficients:
        return Coefficients(*(expand(c, like) for c in self.coefficients(t)))

    def log_snr_half(self, t: Tensor) -> Tensor:
        """log(a / s), the variable of the DPM solvers; minus infinity at pure noise, infinity at data."""
        c = self.coefficients(t)
        return torch.log(c.a) - torch.log(c.s)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    def prior(self, noise: Tensor) -> Tensor:
        one = torch.ones((), device=noise.device)
        return self.at(one, noise).s * noise

    def perturb(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        c = self.at(t, clean)
        return c.a * clean + c.s * noise

    def target(self, clean: Tensor, noise: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self.combine(clean, noise, t, prediction)

    def combine(self, x0: Tensor, eps: Tensor, t: Tensor, prediction: str) -> Tensor:
        """(x0, eps) -> any prediction type."""
        if prediction == "x0":
            return x0
        if prediction == "eps":
            return eps
        c = self.at(t, x0)
        if prediction == "velocity":
            return c.da * x0 + c.ds * eps
        if prediction == "velocity_reversed":
            return -(c.da * x0 + c.ds * eps)
        if prediction == "v":
            return c.a * eps - c.s * x0
        if prediction == "score":
            return -eps / c.s
        raise UserError(f"prediction '{prediction}' is unknown for {type(self).__name__}: {sorted(self.predictions)}")

    def split(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> tuple[Tensor, Tensor]:
        """A network output of any type -> (x0, eps) estimates. Undefined only where the type itself is (0/0)."""
        c = self.at(t, noisy)
        if prediction in ("velocity", "velocity_reversed"):
            v = output if prediction == "velocity" else -output
            wronskian = c.a * c.ds - c.da * c.s
            return (c.ds * noisy - c.s * v) / wronskian, (c.a * v - c.da * noisy) / wronskian
        if prediction == "v":
            norm = c.a * c.a + c.s * c.s
            return (c.a * noisy - c.s * output) / norm, (c.s * noisy + c.a * output) / norm
        if prediction == "x0":
            return output, (noisy - c.a * output) / c.s
        eps = output if prediction == "eps" else -c.s * output
        if prediction not in ("eps", "score"):
            raise UserError(f"prediction '{prediction}' is unknown: {sorted(self.predictions)}")
        return (noisy - c.s * eps) / c.a, eps

    def convert(self, noisy: Tensor, output: Tensor, t: Tensor, source: str, to: str) -> Tensor:
        """Between any two prediction types at the same (noisy, t)."""
        if source == to:
            return output
        x0, eps = self.split(noisy, output, t, source)
        return self.combine(x0, eps, t, to)

    def denoise(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self.split(noisy, output, t, prediction)[0]

    def step(self, noisy: Tensor, output: Tensor, t: Tensor, t_next: Tensor, prediction: str, noise: Tensor) -> Tensor:
        x0, eps = self.split(noisy, output, t, prediction)
        c = self.at(t_next, noisy)
        return c.a * x0 + c.s * eps

    def derivative(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self.convert(noisy, output, t, prediction, "velocity")

    def errors(
        self, output: Tensor, clean: Tensor, noise: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str
    ) -> tuple[Tensor, Tensor | None]:
        difference = self.convert(noisy, output, t, prediction, space) - self.target(clean, noise, t, space)
        return difference.square(), difference.abs()

    def distance(self, output: Tensor, other: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str) -> Tensor:
        a = self.convert(noisy, output, t, prediction, space)
        return (a - self.convert(noisy, other, t, prediction, space)).square()


@dataclass(frozen=True)
class RectifiedFlow(Gaussian):
    """x_t = (1 - t) x0 + t eps, velocity eps - x0 (arXiv 2209.03003; FLUX, SD3, Wan, LTX)."""

    def coefficients(self, t: Tensor) -> Coefficients:
        return Coefficients(1 - t, t, torch.full_like(t, -1.0), torch.ones_like(t))

    def step(self, noisy: Tensor, output: Tensor, t: Tensor, t_next: Tensor, prediction: str, noise: Tensor) -> Tensor:
        # Same operations as diffusers' Euler scheduler, so that samples agree with it bit for bit.
        return noisy + expand(t_next - t, noisy) * self.convert(noisy, output, t, prediction, "velocity")


@dataclass(frozen=True)
class VariancePreserving(Gaussian):
    """a^2 + s^2 = 1. schedule "cosine": a = cos(pi t / 2); "linear": the DDPM betas in continuous time (2011.13456)."""

    schedule: str = "cosine"
    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "linear"):
            raise UserError(f"variance preserving schedule '{self.schedule}' is unknown; use cosine or linear")

    def coefficients(self, t: Tensor) -> Coefficients:
        if self.schedule == "cosine":
            angle = t * (math.pi / 2)
            a, s = torch.cos(angle).clamp(min=0), torch.sin(angle)  # rounding makes cos(pi / 2) negative
            return Coefficients(a, s, -(math.pi / 2) * s, (math.pi / 2) * a)
        integral = self.beta_min * t + 0.5 * (self.beta_max - self.beta_min) * t * t
        beta = self.beta_min + (self.beta_max - self.beta_min) * t
        a = torch.exp(-0.5 * integral)
        s = torch.sqrt(-torch.expm1(-integral))
        da = -0.5 * beta * a
        # s ds = -a da; at t = 0 the derivative of s is infinite and never used (no residual there).
        return Coefficients(a, s, da, -a * da / s.clamp(min=1e-12))


@dataclass(frozen=True)
class EDM(Gaussian):
    """Variance exploding x = x0 + sigma eps with Karras' sigma(t) (arXiv 2206.00364); t = 0 is sigma 0 exactly.

    "edm_f" is the raw network behind EDM's preconditioning: x0 = c_skip x + c_out F.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5
    rho: float = 7.0

    predictions = Gaussian.predictions | {"edm_f"}

    def sigma(self, t: Tensor) -> Tensor:
        low, high = self.sigma_min ** (1 / self.rho), self.sigma_max ** (1 / self.rho)
        return torch.where(t > 0, (low + t * (high - low)) ** self.rho, torch.zeros_like(t))

    def time(self, sigma: Tensor) -> Tensor:
        """The inverse of :meth:`sigma`; 0 maps to 0."""
        low, high = self.sigma_min ** (1 / self.rho), self.sigma_max ** (1 / self.rho)
        return torch.where(sigma > 0, (sigma ** (1 / self.rho) - low) / (high - low), torch.zeros_like(sigma))

    def coefficients(self, t: Tensor) -> Coefficients:
        low, high = self.sigma_min ** (1 / self.rho), self.sigma_max ** (1 / self.rho)
        rate = self.rho * (high - low) * (low + t * (high - low)) ** (self.rho - 1)
        return Coefficients(torch.ones_like(t), self.sigma(t), torch.zeros_like(t), rate)

    def preconditioning(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        sigma = expand(self.sigma(t), like)
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total.sqrt()

    def split(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> tuple[Tensor, Tensor]:
        if prediction == "edm_f":
            skip, out = self.preconditioning(t, noisy)
            output, prediction = skip * noisy + out * output, "x0"
        return super().split(noisy, output, t, prediction)

    def combine(self, x0: Tensor, eps: Tensor, t: Tensor, prediction: str) -> Tensor:
        if prediction == "edm_f":
            noisy = self.perturb(x0, eps, t)
            skip, out = self.preconditioning(t, noisy)
            return (x0 - skip * noisy) / out
        return super().combine(x0, eps, t, prediction)

    def derivative(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self.convert(noisy, output, t, prediction, "eps")

    def clock(self, t: Tensor) -> Tensor:
        return self.sigma(t)


@dataclass(frozen=True)
class Torus(Process):
    """Rectified flow along geodesics of the flat torus [0, period) (arXiv 2302.03660, 2406.04713).

    The noise is a uniform point x1; d = shortest displacement from x0 to x1; x_t = wrap(x0 + t d); velocity = d.
    """

    period: float = 1.0

    predictions = frozenset({"velocity", "velocity_reversed"})
    spaces = frozenset({"x0", "velocity"})
    continuous = True

    def wrap(self, x: Tensor) -> Tensor:
        rest = torch.remainder(x, self.period)
        return torch.where(rest < self.period, rest, 0.0)  # a tiny negative x rounds up to the period itself

    def shortest(self, x: Tensor) -> Tensor:
        """A displacement modulo the period, in [-period/2, period/2)."""
        return torch.remainder(x + self.period / 2, self.period) - self.period / 2

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return self.period * torch.rand(shape, generator=generator, device=generator.device)

    def prior(self, noise: Tensor) -> Tensor:
        return noise

    def perturb(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return self.wrap(clean + expand(t, clean) * self.shortest(noise - clean))

    def _velocity(self, output: Tensor, prediction: str) -> Tensor:
        if prediction not in self.predictions:
            raise UserError(f"prediction '{prediction}' is unknown for Torus: {sorted(self.predictions)}")
        return output if prediction == "velocity" else -output

    def target(self, clean: Tensor, noise: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self._velocity(self.shortest(noise - clean), prediction)

    def denoise(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self.wrap(noisy - expand(t, noisy) * self._velocity(output, prediction))

    def step(self, noisy: Tensor, output: Tensor, t: Tensor, t_next: Tensor, prediction: str, noise: Tensor) -> Tensor:
        return self.move(noisy, expand(t_next - t, noisy) * self._velocity(output, prediction))

    def derivative(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        return self._velocity(output, prediction)

    def move(self, value: Tensor, delta: Tensor) -> Tensor:
        return self.wrap(value + delta)

    def difference(self, a: Tensor, b: Tensor) -> Tensor:
        return self.shortest(a - b)

    def errors(
        self, output: Tensor, clean: Tensor, noise: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str
    ) -> tuple[Tensor, Tensor | None]:
        if space == "x0":
            difference = self.shortest(self.denoise(noisy, output, t, prediction) - clean)
        else:
            difference = self._velocity(output, prediction) - self.shortest(noise - clean)
        return difference.square(), difference.abs()

    def distance(self, output: Tensor, other: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str) -> Tensor:
        scale = expand(t, noisy) if space == "x0" else 1.0
        return (scale * (output - other)).square()


@dataclass(frozen=True)
class MaskedCategorical(Process):
    """Absorbing-state corruption of categories (MDLM, arXiv 2406.07524): a site is masked iff its uniform u < t.

    Values are int64 in 0..n_classes-1, ``n_classes`` itself is the mask. The noise is two uniforms a site,
    [..., 2]: the order in which sites are revealed, and the inverse-CDF draw of the revealed class. So sampling is a
    deterministic function of the noise, like an ODE, and members of a group can share their corruption pattern.
    The loss is cross-entropy on masked sites with the ELBO weight 1 / t; it has no self-normaliser.
    """

    n_classes: int

    predictions = frozenset({"logits"})
    spaces = Gaussian.spaces  # categories compare classes whichever space the other streams use
    continuous = False

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand((*shape, 2), generator=generator, device=generator.device)

    def prior(self, noise: Tensor) -> Tensor:
        return torch.full(noise.shape[:-1], self.n_classes, dtype=torch.int64, device=noise.device)

    def perturb(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        masked = noise[..., 0] < expand(t, clean)
        return torch.where(masked, self.n_classes, clean)

    def difference(self, a: Tensor, b: Tensor) -> Tensor:
        return (a != b).to(torch.int64)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor, prediction: str) -> Tensor:
        one_hot = torch.nn.functional.one_hot(clean.clamp(max=self.n_classes - 1), self.n_classes)
        return torch.log(one_hot.float().clamp(min=1e-30))

    def denoise(self, noisy: Tensor, output: Tensor, t: Tensor, prediction: str) -> Tensor:
        return torch.softmax(output.float(), dim=-1)

    def step(self, noisy: Tensor, output: Tensor, t: Tensor, t_next: Tensor, prediction: str, noise: Tensor) -> Tensor:
        cdf = torch.softmax(output.double(), dim=-1).cumsum(-1)
        chosen = (noise[..., 1:].double() >= cdf).sum(-1).clamp(max=self.n_classes - 1)
        reveal = (noisy == self.n_classes) & (noise[..., 0] >= expand(t_next, noisy))
        return torch.where(reveal, chosen, noisy)

    def errors(
        self, output: Tensor, clean: Tensor, noise: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str
    ) -> tuple[Tensor, Tensor | None]:
        log_p = torch.log_softmax(output.float(), dim=-1)
        nll = -log_p.gather(-1, clean.clamp(max=self.n_classes - 1).unsqueeze(-1)).squeeze(-1)
        return torch.where(noisy == self.n_classes, nll / expand(t, noisy), 0.0), None

    def distance(self, output: Tensor, other: Tensor, noisy: Tensor, t: Tensor, prediction: str, space: str) -> Tensor:
        log_p, log_q = torch.log_softmax(output.float(), -1), torch.log_softmax(other.float(), -1)
        kl = (log_q.exp() * (log_q - log_p)).sum(-1)
        return torch.where(noisy == self.n_classes, kl / expand(t, noisy), 0.0)

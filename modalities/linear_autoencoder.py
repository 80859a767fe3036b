"""A linear autoencoder with AutoencoderKL's interface: principal components of 4x4 patches."""

from __future__ import annotations

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn


class LinearAutoencoder(ModelMixin, ConfigMixin):
    """Maps [B, 3, H, W] in [-1, 1] to [B, 16, H/4, W/4] and back by one strided convolution each way.

    Pipelines read the scale factor off the length of `block_out_channels`: three levels, two halvings, so 4.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 3,
        latent_channels: int = 16,
        block_out_channels: tuple[int, ...] = (16, 16, 16),
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
    ) -> None:
        super().__init__()
        patch = 2 ** (len(block_out_channels) - 1)
        self.encoder = nn.Conv2d(in_channels, latent_channels, patch, stride=patch)
        self.decoder = nn.ConvTranspose2d(latent_channels, in_channels, patch, stride=patch)

    @classmethod
    def fit(
        cls, images: Tensor, latent_channels: int = 16, whitening: float = 0.5, chroma_weight: float = 2.0
    ) -> LinearAutoencoder:
        """Principal components of the 4x4 patches of `images` [N, 3, H, W] in [-1, 1].

        Brightness contrast outweighs hue in plain RGB, so components are taken where a pixel's deviation from its own
        grey counts `chroma_weight` times. Channel i is divided by its deviation to the power `whitening`: 0 keeps the
        components' variances, 1 makes all equal. `scaling_factor` and `shift_factor` then bring the latents to
        mean 0 and variance 1 overall.
        """
        channels, patch = images.shape[1], 4
        patches = nn.functional.unfold(images, patch, stride=patch).mT.reshape(-1, channels * patch**2).double()
        grey = torch.full((channels, channels), 1 / channels, dtype=torch.float64)
        weight = torch.kron(grey + chroma_weight * (torch.eye(channels) - grey), torch.eye(patch**2).double())
        mean = patches.mean(0)
        centred = (patches - mean) @ weight
        variance, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
        variance, basis = variance.flip(0)[:latent_channels], vectors.flip(1)[:, :latent_channels].T
        # An eigenvector's sign is the solver's choice; fix it so that a rebuild gives the same latents.
        basis = basis * basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
        scale = variance[:, None].sqrt() ** whitening
        encode, decode = basis / scale @ weight, basis * scale @ torch.linalg.inv(weight)
        # A transposed convolution has one bias a channel, so it holds the mean patch only where that is flat; the
        # rest of it goes through the latents.
        flat = mean.reshape(channels, -1).mean(1)
        bias = -encode @ flat.repeat_interleave(patch**2)
        latents = patches @ encode.T + bias
        model = cls(
            in_channels=channels,
            latent_channels=latent_channels,
            scaling_factor=1.0 / latents.std().item(),
            shift_factor=latents.mean().item(),
        )
        with torch.no_grad():
            model.encoder.weight.copy_(encode.reshape(model.encoder.weight.shape))
            model.encoder.bias.copy_(bias)
            model.decoder.weight.copy_(decode.reshape(model.decoder.weight.shape))
            model.decoder.bias.copy_(flat)
        return model.requires_grad_(False)

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        mean = self.encoder(x)
        posterior = DiagonalGaussianDistribution(torch.cat([mean, torch.zeros_like(mean)], dim=1), deterministic=True)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        image = self.decoder(z)
        return DecoderOutput(sample=image) if return_dict else (image,)

    def forward(self, sample: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        return self.decode(self.encode(sample).latent_dist.mode(), return_dict=return_dict)

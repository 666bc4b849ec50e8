"""A network by others: `21cmpsdenoiser==1.0.2` (PyPI, MIT), given a noisy 21-cm power spectrum samples its mean.

Facts about it: a U-Net ε(x, 999 t, condition) on fields of 32×16 (k⊥ × k∥), log₁₀ of power scaled to [−1, 1]; a
variance-preserving process with β from 0.1 to 20; sampling ends at t = 10⁻³. Its package comes without simulations, so
conditions are made here: smooth spectra of random height, slope, bend and anisotropy, with the sample variance of the
package's own numbers of modes. They are plausible inputs, not the authors' test set.

References:
    | 21cmPSDenoiser (Breitman et al., 2025)
    | https://github.com/DanielaBreitman/21cmPSDenoiser
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from networks import packaged
from steindiff import VP, Epsilon, Model
from steindiff.denoisers.base import Denoiser

NAME = "cosmology"
SHAPE = (1, 32, 16)
SEEDS_PER_CONDITION = 8
CONDITIONS = 4096
TIMES = 999.0
"""What the network is told at t = 1."""


def spectra(numbers: Sequence[int], constants: dict[str, np.ndarray]) -> Tensor:
    """Noisy spectra as the network takes them, (N, 1, 32, 16): each a function of its number alone."""
    log_perp, log_par = np.log10(constants["kperp"])[:, None], np.log10(constants["kpar"])[None, :]
    modes = np.maximum(constants["Nmodes"], 1.0)
    # The network knows log-power between these bounds; stay in the middle half.
    low, width = float(constants["noisy_mean"][0]), float(constants["noisy_std"][0])
    fields = []
    for number in numbers:
        generator = np.random.default_rng(number)
        height = low + width * generator.uniform(0.5, 0.75)
        slope, bend, tilt = generator.uniform((-0.3, -0.5, -0.4), (0.8, 0.1, 0.4))
        k = 0.5 * np.log10(10 ** (2 * log_perp) + 10 ** (2 * log_par)) + 0.5
        smooth = height + slope * k + bend * k**2 + tilt * (log_par - log_perp) / 4
        noisy = smooth + np.log10(generator.gamma(modes, 1 / modes))
        fields.append(2 * (noisy - low) / width - 1)
    return torch.from_numpy(np.stack(fields)).float()[:, None]


def condition(seed: int) -> int:
    """The number of a seed's spectrum."""
    return seed // SEEDS_PER_CONDITION % CONDITIONS


def load(device: torch.device | str = "cpu") -> Model:
    """The network as a model; eight consecutive seeds share a condition.

    Raises:
        ModuleNotFoundError: if the package, or einops, is not installed.
    """
    folder = packaged.folder("psdenoiser", "21cmpsdenoiser==1.0.2")
    architecture = packaged.module("psdenoiser.model", folder / "model.py")
    with torch.random.fork_rng():  # its first weights are drawn, and not used
        network = architecture.UNet(dim=SHAPE[1:], channels=2, dim_mults=(1, 2, 4, 8), cdn_len=None)
    with np.load(folder / "constants.npz") as file:
        constants = {key: file[key] for key in ("kperp", "kpar", "Nmodes", "noisy_mean", "noisy_std")}
    network.load_state_dict(torch.load(folder / "denoiser_model.pt", map_location="cpu", weights_only=True))
    network.to(device).eval().requires_grad_(False)

    def denoiser(seeds: Sequence[int]) -> Denoiser:
        given = spectra([condition(seed) for seed in seeds], constants).to(device)
        return Epsilon(lambda x, t: network(x, TIMES * t, x_cdn=given))

    return Model(denoiser, VP(), SHAPE, device=device, name=NAME, condition=condition)

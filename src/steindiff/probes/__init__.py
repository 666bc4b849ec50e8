"""Probes: derivatives of a step or a denoiser, from one linearised pass."""

from steindiff.probes.pullback import by_autograd, by_functional, pullback

__all__ = ["by_autograd", "by_functional", "pullback"]

"""Diagnostics: what a step does to errors, measured; each as data and as a plot on given axes."""

from steindiff.diagnostics._certificate import Certificate, certificate, plot_certificate
from steindiff.diagnostics._decay import Decay, decay, plot_decay
from steindiff.diagnostics._lipschitz import Lipschitz, difference, lipschitz, operator_norm, plot_lipschitz
from steindiff.diagnostics.coupling import Flow, couple, fine_flow, ideal_step
from steindiff.diagnostics.gamma import Gammas, SteinGamma, gammas, ideal_gammas, plot_gammas, sampled_gammas

__all__ = [
    "Certificate",
    "Decay",
    "Flow",
    "Gammas",
    "Lipschitz",
    "SteinGamma",
    "certificate",
    "couple",
    "decay",
    "difference",
    "fine_flow",
    "gammas",
    "ideal_gammas",
    "ideal_step",
    "lipschitz",
    "operator_norm",
    "plot_certificate",
    "plot_decay",
    "plot_gammas",
    "plot_lipschitz",
    "sampled_gammas",
]

"""Diagnostics: what a step does to errors, measured; each as data and as a plot on given axes."""

from steindiff.diagnostics._steps import (
    Certificate,
    Lipschitz,
    SteinGamma,
    certificate,
    difference,
    lipschitz,
    operator_norm,
    plot_certificate,
    plot_gammas,
    plot_lipschitz,
    sampled_gammas,
)

__all__ = [
    "Certificate",
    "Lipschitz",
    "SteinGamma",
    "certificate",
    "difference",
    "lipschitz",
    "operator_norm",
    "plot_certificate",
    "plot_gammas",
    "plot_lipschitz",
    "sampled_gammas",
]

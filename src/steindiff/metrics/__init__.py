"""Measures of images: Fréchet distance (FID, FD-EfficientNet, FD-DINOv2), KID, precision, recall, IS, LPIPS, PSNR."""

from steindiff.metrics.efficientnet import EfficientNetFeatures
from steindiff.metrics.features import InceptionFeatures, RandomFeatures, WeightsUnavailable, dinov2_features
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.metrics.lpips import LPIPS
from steindiff.metrics.scores import (
    inception_classifier,
    inception_score,
    kernel_distance,
    precision_recall,
    psnr,
    spread,
)

__all__ = [
    "LPIPS",
    "EfficientNetFeatures",
    "InceptionFeatures",
    "Moments",
    "RandomFeatures",
    "WeightsUnavailable",
    "dinov2_features",
    "frechet_distance",
    "inception_classifier",
    "inception_score",
    "kernel_distance",
    "precision_recall",
    "psnr",
    "spread",
]

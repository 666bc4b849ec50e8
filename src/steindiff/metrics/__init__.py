"""Measures of images: Fréchet distance (FID, FD-EfficientNet, FD-DINOv2), KID, precision, recall, IS, PSNR."""

from steindiff.metrics._inception_score import inception_classifier, inception_score
from steindiff.metrics._precision_recall import precision_recall
from steindiff.metrics.efficientnet import EfficientNetFeatures
from steindiff.metrics.fd_dinov2 import dinov2_features
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.metrics.inception import InceptionFeatures
from steindiff.metrics.kid import kernel_distance
from steindiff.metrics.likeness import psnr, spread
from steindiff.metrics.pretrained import WeightsUnavailable
from steindiff.metrics.random_features import RandomFeatures

__all__ = [
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

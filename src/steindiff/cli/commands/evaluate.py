"""`steindiff evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from steindiff import datasets
from steindiff.cli import options
from steindiff.cli.output import note, print_json, progress, results
from steindiff.discovery import named
from steindiff.metrics import (
    InceptionFeatures,
    Moments,
    WeightsUnavailable,
    dinov2_features,
    frechet_distance,
    inception_classifier,
    inception_score,
    kernel_distance,
    precision_recall,
    references,
)

EXAMPLES = (
    "steindiff evaluate samples --reference cifar10-train",
    "steindiff evaluate samples.npz --reference real-images --metrics fid,kid,precision-recall --json",
    "steindiff evaluate samples --reference cifar10 --metrics fid,is,fd-dinov2 --device cuda --batch 200",
)

SHIPPED = sorted(path.stem for path in references.FOLDER.glob("*.npz"))
"""Names of the statistics that ship with the package."""
SUBSET = 1000
"""KID is averaged over subsets of this size, or of the smaller set."""


class NotMeasured(Exception):
    """Why a measure could not be taken; the others still can."""


def archive(path: Path, batch: int) -> Iterator[Tensor]:
    """Images of a `.npz` file, its array `images` or its only one, bytes `(N, H, W, C)`; yields `(B, 3, H, W)`.

    Raises:
        ValueError: if the file holds no such array.
    """
    try:
        with np.load(path) as arrays:
            key = "images" if "images" in arrays else arrays.files[0]
            images = arrays[key]
    except (ValueError, IndexError, EOFError) as error:
        raise ValueError(f"{path}: not an archive of images ({error})") from None
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or images.dtype != np.uint8 or not len(images):
        raise ValueError(f"{path}: {key} is {images.dtype} {images.shape}, need bytes of shape (N, H, W, 1 or 3)")
    for part in torch.from_numpy(images).movedim(-1, 1).split(batch):
        yield part.expand(-1, 3, -1, -1)


def pictures(path: Path, batch: int) -> Iterator[Tensor]:
    """Images of a folder or a `.npz` file, bytes `(B, 3, H, W)` a batch at a time."""
    return archive(path, batch) if path.suffix == ".npz" else datasets.folder(path, batch)


class Evaluation:
    """Samples, what they are compared with, and features of both, made when first needed.

    Args:
        samples: folder or `.npz` file.
        reference: name of shipped statistics or of a dataset, or a folder or `.npz` file; None: nothing.
        device: where the networks run.
        batch: images at a time.
    """

    def __init__(self, samples: Path, reference: str | None, device: str, batch: int) -> None:
        self.samples = samples
        self.reference = reference
        self.device = device
        self.batch = batch

    @property
    def real(self) -> Iterator[Tensor]:
        """The reference's images.

        Raises:
            NotMeasured: if there are none, but statistics at most.
        """
        if self.reference is None:
            raise NotMeasured("needs --reference")
        if self.reference in datasets.SOURCES:
            images = datasets.load(self.reference).images
            return (part.expand(-1, 3, -1, -1) for part in images.split(self.batch))
        if self.reference in SHIPPED:
            raise NotMeasured(f"{self.reference} holds statistics only; give a folder, a .npz file or a dataset's name")
        return pictures(Path(self.reference), self.batch)

    @cached_property
    def inception(self) -> InceptionFeatures:
        """The Inception network."""
        try:
            return InceptionFeatures.load(datasets.inception(), self.device)
        except datasets.Unavailable as error:
            raise NotMeasured(str(error)) from error

    def gather(self, images: Iterator[Tensor], network: Callable[[Tensor], Tensor]) -> Tensor:
        """What a network makes of images, `(N, F)`."""
        with torch.no_grad():
            return torch.cat([network(part.to(self.device)).cpu() for part in images])

    @cached_property
    def sampled_features(self) -> Tensor:
        """Inception features of the samples, `(N, 2048)`."""
        return self.gather(pictures(self.samples, self.batch), self.inception)

    @cached_property
    def real_features(self) -> Tensor:
        """Inception features of the reference, `(M, 2048)`."""
        return self.gather(self.real, self.inception)

    def fid(self) -> float:
        """Fréchet distance of Inception features."""
        if self.reference in SHIPPED:
            return frechet_distance(Moments.of(self.sampled_features), references.load(str(self.reference)))
        return frechet_distance(Moments.of(self.sampled_features), Moments.of(self.real_features))

    def kid(self) -> dict[str, float]:
        """Kernel distance of Inception features."""
        x, y = self.sampled_features, self.real_features
        size = min(SUBSET, len(x), len(y))
        return kernel_distance(x, y, size=size, generator=torch.Generator().manual_seed(0))._asdict()

    def precision_recall(self) -> dict[str, float]:
        """Precision and recall on Inception features."""
        return precision_recall(self.real_features, self.sampled_features)._asdict()

    def inception_score(self) -> dict[str, float]:
        """Inception score."""
        logits = self.gather(pictures(self.samples, self.batch), inception_classifier(self.device))
        return inception_score(logits, splits=min(10, len(logits)))._asdict()

    def fd_dinov2(self) -> float:
        """Fréchet distance of DINOv2 features."""
        real, network = self.real, dinov2_features(self.device)
        sampled = pictures(self.samples, self.batch)
        return frechet_distance(*(Moments.of(self.gather(images, network)) for images in (sampled, real)))


METRICS: dict[str, Callable[[Evaluation], Any]] = {
    "fid": Evaluation.fid,
    "kid": Evaluation.kid,
    "precision-recall": Evaluation.precision_recall,
    "is": Evaluation.inception_score,
    "fd-dinov2": Evaluation.fd_dinov2,
}
"""The measures by name."""


def command(
    samples: Annotated[Path, typer.Argument(help="Folder of images, or a .npz file with bytes (N, H, W, C).")],
    reference: Annotated[
        str | None,
        typer.Option(
            help=f"What to compare with: shipped statistics ({', '.join(SHIPPED)}, FID only), a dataset "
            f"({', '.join(datasets.SOURCES)}, downloaded once), a folder or a .npz file."
        ),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Measures, several as fid,kid.", autocompletion=lambda: list(METRICS))
    ] = ",".join(METRICS),
    device: options.Device = "auto",
    batch: options.Batch = 50,
    json: options.Json = False,
) -> None:
    """Measure a folder of images or a .npz file: FID, KID, precision and recall, Inception score, FD-DINOv2.

    Needs the networks behind them: Inception is downloaded once by package name; what cannot be had is said to be
    not measured. Compare equal numbers of samples only: FID falls as they grow.
    """
    chosen = {name: named("metrics", name, METRICS) for name in metrics.split(",")}
    if batch < 1:
        raise ValueError(f"batch = {batch}: allowed are whole numbers >= 1")
    if not samples.exists():
        raise ValueError(f"samples = {str(samples)!r}: no such file or folder")
    evaluation = Evaluation(samples, reference, options.device(device), batch)
    count = sum(len(part) for part in pictures(samples, batch))
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    with progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for name, measure in chosen.items():
            bar.update(task, description=name)
            try:
                found[name] = measure(evaluation)
            except (NotMeasured, WeightsUnavailable) as error:
                reasons[name] = str(error)
            bar.advance(task)
    for name, reason in reasons.items():
        note(f"{name}: not measured: {reason}")
    if not found:
        raise ValueError("metrics: none of those asked for could be measured")
    if json:
        print_json({"samples": count, "reference": reference, **found, "not_measured": reasons})
        return
    results.print(f"{count} images" + (f" against {reference}" if reference else ""))
    for name, value in found.items():
        parts = value if isinstance(value, dict) else {"": value}
        results.print(f"[bold]{name}[/]  " + "  ".join(f"{key} {number:.4g}".strip() for key, number in parts.items()))

"""`steindiff evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from steindiff import datasets
from steindiff._checks import at_least
from steindiff._discovery import named
from steindiff._distributed import gather, rank
from steindiff.cli import options
from steindiff.cli.output import note, print_json, progress, show, text
from steindiff.images import Archive, Folder, Pictures
from steindiff.metrics import (
    EfficientNetFeatures,
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
from steindiff.production import Images
from steindiff.production.manifest import MANIFEST

EXAMPLES = (
    "steindiff evaluate samples --reference cifar10-train",
    "steindiff evaluate samples/images.npz --reference real-images --metrics fid,kid,precision-recall --json",
    "steindiff evaluate samples --reference cifar10-train --metrics fid,is --device cuda --batch 200",
    "torchrun --nproc_per_node=8 -m -- steindiff.cli evaluate fifty-thousand --reference cifar10-train --metrics fid",
)

TOGETHER = True
"""Processes started by torchrun share the work."""

SHIPPED = sorted(path.stem for path in references.FOLDER.glob("*.npz"))
"""Names of the statistics that ship with the package."""
SUBSET = 1000
"""KID is averaged over subsets of this size, or of the smaller set."""


class NotMeasured(Exception):
    """Why a measure could not be taken; the others still can."""


def pictures(path: Path) -> Pictures:
    """Images of a set made by `steindiff sample`, of a `.npz` file, or of a folder.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it holds no images, is damaged, or a set is incomplete.
    """
    if (path / MANIFEST).exists():
        return Images(path)
    return Archive(path) if path.suffix == ".npz" else Folder(path)


class Seen(NamedTuple):
    """What a network makes of a set of images: moments of the features, and the features `(N, F)` themselves."""

    moments: Moments
    features: Tensor | None


class Evaluation:
    """Samples, what they are compared with, and features of both, made when first needed.

    With a process group, each process sees a part of the images, and all of them find the same.

    Args:
        samples: the images to measure.
        reference: name of shipped statistics, or a path as `pictures` takes it; None: nothing.
        device: where the networks run.
        batch: images at a time.
        keep: whether a measure needs all features; otherwise one batch at a time is in memory.
    """

    def __init__(self, samples: Pictures, reference: str | None, device: str, batch: int, keep: bool) -> None:
        self.samples = samples
        self.reference = reference
        self.device = device
        self.batch = batch
        self.keep = keep

    @property
    def real(self) -> Pictures:
        """The reference's images.

        Raises:
            NotMeasured: if there are none, but statistics at most.
        """
        if self.reference is None:
            raise NotMeasured("needs --reference")
        if self.reference in SHIPPED:
            raise NotMeasured(f"{self.reference} holds statistics only; give a folder or a .npz file of its images")
        return pictures(Path(self.reference))

    @cached_property
    def inception(self) -> InceptionFeatures:
        """The Inception network."""
        try:
            return InceptionFeatures.load(datasets.inception(), self.device)
        except datasets.Unavailable as error:
            raise NotMeasured(str(error)) from error

    def see(self, images: Pictures, network: Callable[[Tensor], Tensor], keep: bool = False) -> Seen:
        """Look at images through a network.

        Raises:
            ValueError: if there are fewer batches than processes.
        """
        world = rank().world
        if len(images) <= self.batch * (world - 1):
            raise ValueError(
                f"batch = {self.batch}: {len(images)} images are fewer than a batch for each of {world} processes; "
                "choose a smaller one"
            )
        kept = []

        def features(part: Tensor) -> Tensor:
            found = network(part.expand(-1, 3, -1, -1).to(self.device))
            if keep:
                kept.append(found.cpu())
            # Moments are of float64, which not every accelerator has.
            return found if found.is_cuda else found.cpu()

        moments = Moments.stream(images.batches(self.batch, rank()), features).all_reduce().to("cpu")
        return Seen(moments, gather(torch.cat(kept)) if keep else None)

    @cached_property
    def sampled(self) -> Seen:
        """The samples through Inception, 2048 features."""
        return self.see(self.samples, self.inception, self.keep)

    @cached_property
    def known(self) -> Seen:
        """The reference through Inception, 2048 features."""
        return self.see(self.real, self.inception, self.keep)

    def features(self) -> tuple[Tensor, Tensor]:
        """Inception features of reference and samples, `(M, 2048)` and `(N, 2048)`."""
        real, sampled = self.known.features, self.sampled.features
        assert real is not None, "keep is set for measures that need features"
        assert sampled is not None
        return real, sampled

    def fid(self) -> float:
        """Fréchet distance of Inception features."""
        shipped = self.reference in SHIPPED
        return frechet_distance(
            self.sampled.moments, references.load(str(self.reference)) if shipped else self.known.moments
        )

    def kid(self) -> dict[str, float]:
        """Kernel distance of Inception features."""
        real, sampled = self.features()
        size = min(SUBSET, len(sampled), len(real))
        return kernel_distance(sampled, real, size=size, generator=torch.Generator().manual_seed(0))._asdict()

    def precision_recall(self) -> dict[str, float]:
        """Precision and recall on Inception features."""
        return precision_recall(*self.features())._asdict()

    def inception_score(self) -> dict[str, float]:
        """Inception score."""
        logits = self.see(self.samples, inception_classifier(self.device), keep=True).features
        assert logits is not None
        return inception_score(logits, splits=min(10, len(logits)))._asdict()

    def frechet(self, load: Callable[[], Callable[[Tensor], Tensor]]) -> float:
        """Fréchet distance of the features of a network, which is loaded once there is something to compare with."""
        real, network = self.real, load()
        return frechet_distance(*(self.see(images, network).moments for images in (self.samples, real)))

    def fd_efficientnet(self) -> float:
        """Fréchet distance of EfficientNet features, of another design than Inception's."""
        try:
            return self.frechet(lambda: EfficientNetFeatures.load(datasets.efficientnet(), self.device))
        except datasets.Unavailable as error:
            raise NotMeasured(str(error)) from error

    def fd_dinov2(self) -> float:
        """Fréchet distance of DINOv2 features."""
        return self.frechet(lambda: dinov2_features(self.device))


METRICS: dict[str, Callable[[Evaluation], Any]] = {
    "fid": Evaluation.fid,
    "kid": Evaluation.kid,
    "precision-recall": Evaluation.precision_recall,
    "is": Evaluation.inception_score,
    "fd-efficientnet": Evaluation.fd_efficientnet,
    "fd-dinov2": Evaluation.fd_dinov2,
}
"""The measures by name."""

KEEPING = {"kid", "precision-recall"}
"""Those that need all Inception features at once."""


def command(
    samples: Annotated[Path, typer.Argument(help="What `steindiff sample` wrote, a folder of images, or a .npz file.")],
    reference: Annotated[
        str | None,
        typer.Option(
            help=f"What to compare with: shipped statistics ({', '.join(SHIPPED)}, FID only), a folder or a .npz file."
        ),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Measures, several as fid,kid.", autocompletion=lambda: list(METRICS))
    ] = ",".join(METRICS),
    device: options.Device = "auto",
    batch: options.Batch = 50,
    json: options.Json = False,
) -> None:
    """Measure a set of images: FID, KID, precision and recall, Inception score, FD-EfficientNet, FD-DINOv2.

    Needs the networks behind them, downloaded once; what cannot be had is said to be not measured. Compare equal
    numbers of samples only: FID falls as they grow.
    """
    chosen = {name: named("metrics", name, METRICS) for name in metrics.split(",")}
    at_least("batch", batch, 1)
    if not samples.exists():
        raise ValueError(f"samples = {str(samples)!r}: no such file or folder")
    images = pictures(samples)
    evaluation = Evaluation(images, reference, options.device(device), batch, bool(KEEPING & set(chosen)))
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
    if rank().rank:
        return
    for name, reason in reasons.items():
        note(f"{name}: not measured: {reason}")
    if not found:
        raise ValueError("metrics: none of those asked for could be measured")
    if json:
        print_json({"samples": len(images), "reference": reference, **found, "not_measured": reasons})
        return
    show(f"{len(images)} images" + (f" against {text(reference)}" if reference else ""))
    for name, value in found.items():
        parts = value if isinstance(value, dict) else {"": value}
        show(f"[bold]{name}[/]  " + "  ".join(f"{key} {number:.4g}".strip() for key, number in parts.items()))

"""`steindiff evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from steindiff import datasets, metrics
from steindiff._checks import at_least, nearest
from steindiff._discovery import named
from steindiff._distributed import gather, rank
from steindiff.cli import options, subjects
from steindiff.cli.output import note, print_json, progress, show, text
from steindiff.comparison import CompareOptions, many_steps, other, run
from steindiff.images import Archive, Folder, Pictures
from steindiff.metrics import InceptionFeatures, Moments, frechet_distance, references
from steindiff.metrics.frechet import bias, distance
from steindiff.model import fingerprint_gap
from steindiff.production import Images
from steindiff.production.manifest import MANIFEST, SAME_MODEL
from steindiff.yardsticks import by_inception, by_random_features

EXAMPLES = (
    "steindiff evaluate samples --reference cifar10-train",
    "steindiff evaluate samples/images.npz --reference real-images --metrics fid,kid,precision-recall --json",
    "steindiff evaluate samples --reference cifar10-train --metrics fid,is --device cuda --batch 200",
    "torchrun --nproc_per_node=8 -m -- steindiff.cli evaluate fifty-thousand --reference cifar10-train --metrics fid",
)

TOGETHER = True
"""Processes started by torchrun share the work."""

SHIPPED = {"cifar10-train": "colour, 32 × 32"}
"""The statistics that ship with the package, and of what images they are."""
SUBSET = 1000
"""KID is averaged over subsets of this size, or of the smaller set."""
FEW = 10_000
"""Sets of fewer images are told by how much that raises their FID, and how sure it is."""
OWN = {"cpu": 64, "cuda": 5000, "mps": 256}
"""How many images at most are compared with the model's own samples, which have to be made."""


class NotMeasured(Exception):
    """Why a measure could not be taken; the others still can."""


def pictures(path: Path) -> Pictures:
    """Images of a set made by `steindiff sample`, of a `.npz` file, or of a folder."""
    if (path / MANIFEST).exists():
        return Images(path)
    return Archive(path) if path.suffix == ".npz" else Folder(path)


def kind(images: Pictures, batch: int) -> str:
    """Colour and size of images, by the first of them."""
    first = next(iter(images.batches(batch)))
    return f"{'grey' if bool((first == first[:, :1]).all()) else 'colour'}, {first.shape[2]} × {first.shape[3]}"


class Seen(NamedTuple):
    """What a network makes of a set of images: moments of the features, and the features `(N, F)`, or none of them."""

    moments: Moments
    features: Tensor


@dataclass
class Evaluation:
    """Samples, what they are compared with, and features of both, made when first needed.

    With a process group, each process sees a part of the images, and all of them find the same. `keep` is set where a
    measure needs all features; otherwise one batch at a time is in memory.
    """

    samples: Pictures
    reference: str | None
    device: str
    batch: int
    keep: bool
    model: str | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def real(self) -> Pictures:
        """The reference's images."""
        if self.reference is None:
            raise NotMeasured("needs --reference")
        if self.reference in SHIPPED:
            raise NotMeasured(f"{self.reference} holds statistics only; give a folder or a .npz file of its images")
        return pictures(Path(self.reference))

    @cached_property
    def inception(self) -> InceptionFeatures:
        """The Inception network."""
        return InceptionFeatures.load(datasets.inception(), self.device)

    def see(self, images: Pictures, network: Callable[[Tensor], Tensor], keep: bool = False) -> Seen:
        """Look at images through a network."""
        world = rank().world
        if len(images) <= self.batch * (world - 1):
            raise ValueError(f"batch must leave one for each of {world} processes, got {self.batch} for {len(images)}")
        kept: list[Tensor] = []

        def features(part: Tensor) -> Tensor:
            found = network(part.expand(-1, 3, -1, -1).to(self.device))
            if keep:
                kept.append(found.cpu())
            # Moments are of float64, which not every accelerator has.
            return found if found.is_cuda else found.cpu()

        moments = Moments.stream(images.batches(self.batch, rank()), features).all_reduce().to("cpu")
        return Seen(moments, gather(torch.cat(kept)) if keep else torch.empty(0))

    @cached_property
    def sampled(self) -> Seen:
        """The samples through Inception, 2048 features."""
        return self.see(self.samples, self.inception, self.keep)

    @cached_property
    def known(self) -> Seen:
        """The reference through Inception, 2048 features."""
        return self.see(self.real, self.inception, self.keep)

    def fid(self) -> float:
        """Fréchet distance of Inception features."""
        shipped = self.reference in SHIPPED
        real = references.load(str(self.reference)) if shipped else self.known.moments
        value, features = frechet_distance(real, self.sampled.moments), self.sampled.features
        if 4 <= len(features) < FEW:
            low, high = distance(features, real).interval
            self.remarks.append(
                f"fid: {len(features)} images raise it by about {bias(features, real):.3g}; as many others would give "
                f"{low:.4g} to {high:.4g}; compare equal numbers only"
            )
        return value

    def own(self) -> dict[str, float]:
        """Distance to the model's own many-step samples of other seeds beside its floor, and what equal seeds say."""
        manifest = self.samples.manifest if isinstance(self.samples, Images) else None
        name = self.model or (None if manifest is None else str(manifest.recipe["model"]))
        if name is None or rank().world > 1:
            raise NotMeasured("needs --model" if name is None else "runs in one process; leave torchrun out")
        guidance = 1.0 if manifest is None else manifest.recipe["conditions"].get("guidance", 1.0)
        try:
            found = subjects.subject(name, guidance, self.device, batch=self.batch)
        except ValueError as error:
            raise NotMeasured(f"{error}; name with --model what made the images") from error
        model, num = found.model, min(len(self.samples), OWN[self.device.partition(":")[0]])
        if manifest is not None and fingerprint_gap(model.fingerprint, manifest.fingerprint) > SAME_MODEL:
            raise NotMeasured(f"{name} is not the model that made these images; name it with --model")
        seeds = range(num) if manifest is None else manifest.seeds[:num]
        parts = islice(self.samples.batches(self.batch), -(-num // self.batch))
        images = torch.cat(list(parts))[:num].float() / 127.5 - 1.0
        try:
            yardstick = by_inception(model, found.channels)
        except datasets.Unavailable:
            yardstick = by_random_features(model, found.channels)
        options = CompareOptions(batch=self.batch, pictures=found.pictures)
        fine = many_steps(options.reference_nfe)
        limit, others = (run(model, fine, part, 1.0, options).images for part in (seeds, other(model, seeds)))
        images = images[:, : limit.shape[1]]  # folders and archives are read as colour
        if images.shape != limit.shape:
            raise NotMeasured(f"images are {tuple(images.shape[1:])}, {name} makes {tuple(limit.shape[1:])}")
        target = Moments.of(yardstick.see(others))
        far = distance(yardstick.see(images), target, num)
        out = {"distance": far.value, "floor": distance(yardstick.see(limit), target, num).value}
        self.remarks.append(
            f"own: {yardstick.features.name} of {num} images; as many others would give {far.interval[0]:.4g} to "
            f"{far.interval[1]:.4g}"
        )
        if manifest is not None:
            conditions = [model.condition_of(seed) for seed in seeds]
            out |= {"psnr": metrics.psnr(images, limit), "spread": metrics.spread(images, limit, conditions)}
            try:
                network = metrics.LPIPS.load(datasets.lpips(), self.device)
                seen = yardstick._replace(lpips=network).perceived(images, limit)
                out |= {} if seen is None else {"lpips": seen}
            except datasets.Unavailable as error:
                self.remarks.append(f"lpips: not measured: {error}")
        return out

    def kid(self) -> dict[str, float]:
        """Kernel distance of Inception features."""
        real, sampled = self.known.features, self.sampled.features
        size, generator = min(SUBSET, len(sampled), len(real)), torch.Generator().manual_seed(0)
        return metrics.kernel_distance(sampled, real, size=size, generator=generator)._asdict()

    def precision_recall(self) -> dict[str, float]:
        """Precision and recall on Inception features."""
        return metrics.precision_recall(self.known.features, self.sampled.features)._asdict()

    def inception_score(self) -> dict[str, float]:
        """Inception score."""
        logits = self.see(self.samples, metrics.inception_classifier(self.device), keep=True).features
        return metrics.inception_score(logits, splits=min(10, len(logits)))._asdict()

    def frechet(self, load: Callable[[str], Callable[[Tensor], Tensor]]) -> float:
        """Fréchet distance of the features of a network, which is loaded once there is something to compare with."""
        real, network = self.real, load(self.device)
        return frechet_distance(*(self.see(images, network).moments for images in (self.samples, real)))


METRICS: dict[str, Callable[[Evaluation], Any]] = {
    "fid": Evaluation.fid,
    "own": Evaluation.own,
    "kid": Evaluation.kid,
    "precision-recall": Evaluation.precision_recall,
    "is": Evaluation.inception_score,
    "fd-efficientnet": lambda e: e.frechet(lambda d: metrics.EfficientNetFeatures.load(datasets.efficientnet(), d)),
    "fd-dinov2": lambda e: e.frechet(metrics.dinov2_features),
}
"""The measures by name."""

KEEPING = {"kid", "precision-recall"}
"""Those that need all Inception features at once."""


def command(
    samples: Annotated[Path, typer.Argument(help="What `steindiff sample` wrote, a folder of images, or a .npz file.")],
    reference: Annotated[
        str | None,
        typer.Option(help=f"Shipped statistics ({', '.join(SHIPPED)}; FID only), or a folder or .npz file of images."),
    ] = None,
    names: Annotated[
        str, typer.Option("--metrics", help="Measures, several as fid,kid.", autocompletion=lambda: list(METRICS))
    ] = ",".join(METRICS),
    model: Annotated[
        str | None,
        typer.Option(help="Embedded model, or what else made the images; default: what their manifest names."),
    ] = None,
    device: options.Device = "auto",
    batch: options.Batch = 50,
    json: options.Json = False,
) -> None:
    """Measure a set of images: FID, own, KID, precision and recall, Inception score, FD-EfficientNet, FD-DINOv2.

    `own` is the Fréchet distance to the model's own many-step samples of other seeds, beside its floor, and PSNR, LPIPS
    and spread within a condition against those of the same seeds. Networks are downloaded once; what cannot be had is
    said to be not measured. Compare equal numbers of samples only: FID falls as they grow.
    """
    chosen = {name: named("metrics", name, METRICS) for name in names.split(",")}
    at_least("batch", batch, 1)
    if not samples.exists():
        raise ValueError(f"samples = {str(samples)!r}: no such file or folder")
    images = pictures(samples)
    if reference is not None and reference not in SHIPPED and not Path(reference).exists():
        raise ValueError(f"reference = {reference!r}: no such file or folder{nearest(reference, SHIPPED)}")
    keep = bool(KEEPING & set(chosen)) or len(images) < FEW
    evaluation = Evaluation(images, reference, options.device(device), batch, keep, model)
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    with progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for name, measure in chosen.items():
            bar.update(task, description=name)
            try:
                found[name] = measure(evaluation)
            except (NotMeasured, datasets.Unavailable, metrics.WeightsUnavailable) as error:
                reasons[name] = str(error)
            bar.advance(task)
    if rank().rank:
        return
    remarks = evaluation.remarks
    if few := [name for name in found if len(images) < FEW and not any(text.startswith(name) for text in remarks)]:
        remarks.append(f"{', '.join(few)}: of {len(images)} images; fewer than {FEW} compare with equal numbers only")
    if reference is not None:
        mine, theirs = kind(images, batch), SHIPPED.get(reference) or kind(pictures(Path(reference)), batch)
        if mine != theirs:
            remarks.append(f"reference: it is {theirs}, the images are {mine}; distances measure that, too")
    for remark in remarks:
        note(remark)
    for name, reason in reasons.items():
        note(f"{name}: not measured: {reason}")
    if not found:
        raise ValueError("metrics: none of those asked for could be measured")
    if json:
        said = {"remarks": remarks, "not_measured": reasons}
        print_json({"samples": len(images), "reference": reference, **found, **said})
        return
    show(f"{len(images)} images" + (f" against {text(reference)}" if reference else ""))
    for name, value in found.items():
        parts = value if isinstance(value, dict) else {"": value}
        show(f"[bold]{name}[/]  " + "  ".join(f"{key} {number:.4g}".strip() for key, number in parts.items()))

"""Train a model of the zoo, or the strong network.

    python benchmarks/train.py cifar10 --minutes 18 --out runs/cifar10
    python benchmarks/train.py fashion --steps 6000 --batch 256 --out runs/fashion
    python benchmarks/train.py strong --minutes 10 --batch 1024 --optimizer muon --out runs/strong
    python benchmarks/train.py strong --init PIECES --guide cifar10 --guidance 1.5 --minutes 3 --out runs/guided

Writes to `--out`, every few minutes and when the budget is spent or SIGTERM arrives: `log.jsonl` (loss, learning rate,
images/s), `checkpoint.safetensors` (weights, averages, moments of the optimizers; `--resume` continues from it) and
weights in half precision, in pieces of at most 15 MiB: `raw-<i>of<n>.safetensors`,
`ema-<half-life>-<i>of<n>.safetensors` (`--init` starts from such pieces with fresh optimizers). Every file is written
atomically.

`--guide` fits the network to itself as `--init` leaves it, or to the weights `--guided`, guided by a worse one: what
two say together, one learns to say alone. The images are then places to ask at only, and the goal has no noise.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

import training_data
from networks import pieces
from networks.autoguided import Autoguided
from networks.muon import Muon
from networks.strong import strong
from steindiff import _weights as weights
from steindiff import zoo
from steindiff.schedules import Discrete
from steindiff.zoo import ARCHITECTURES, EDMPrecond, VPNoise

P_MEAN, P_STD = -1.2, 1.2
WIDE = (0.07, math.log(0.005), math.log(100.0))
"""Rank of noise levels drawn log-uniformly, and their range: the tails of the EDM density are met too."""
LABEL_DROPOUT = 0.1


def edm_loss(net: EDMPrecond, denoise: nn.Module, x: Tensor, labels: Tensor, goal: nn.Module | None = None) -> Tensor:
    """λ(σ) ‖D(x + σε, σ) − y‖² per dimension, λ = (σ² + σ_d²)/(σ σ_d)², ln σ normal (Karras et al., 2022).

    y is x, or what `goal` answers at the same place.
    """
    share, low, high = WIDE
    normal = P_MEAN + P_STD * torch.randn(len(x), device=x.device)
    uniform = low + (high - low) * torch.rand(len(x), device=x.device)
    sigma = torch.where(torch.rand(len(x), device=x.device) < share, uniform, normal).exp()
    weight = (sigma**2 + net.sigma_data**2) / (sigma * net.sigma_data) ** 2
    noised = x + sigma[:, None, None, None] * torch.randn_like(x)
    if goal is not None:
        with torch.no_grad():
            x = goal(noised, sigma, labels)
    return (weight * (denoise(noised, sigma, labels) - x).square().mean(dim=(1, 2, 3))).mean()


def vp_loss(net: VPNoise, predict: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """‖ε(α_t x + σ_t ε, t) − ε‖² per dimension, t uniform (Ho et al., 2020)."""
    t = torch.randint(net.steps, (len(x),), device=x.device)
    survival = torch.tensor(Discrete.linear(*net.betas, net.steps).alphas_cumprod, dtype=torch.float64, device=x.device)
    alpha, sigma = (table[t].to(x)[:, None, None, None] for table in (survival.sqrt(), (1 - survival).sqrt()))
    epsilon = torch.randn_like(x)
    return (predict(alpha * x + sigma * epsilon, t, labels) - epsilon).square().mean()


LOSSES: dict[type[nn.Module], Callable[..., Tensor]] = {EDMPrecond: edm_loss, VPNoise: vp_loss}
DATA = {"strong": "cifar10"}
"""Networks trained on the dataset of another name than theirs."""
FLIPS = {"cifar10": 0.5, "fashion": 0.0}


def batches(data: training_data.Dataset, size: int, flips: float, num_classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless shuffled batches: images (B, C, H, W) in [−1, 1], labels (B,) with some replaced by the null label."""
    device = data.images.device
    while True:
        for index in torch.randperm(len(data.images), device=device).split(size):
            if len(index) < size:
                continue
            x = data.images[index].float() / 127.5 - 1
            flip = torch.rand(size, device=device) < flips
            x = torch.where(flip[:, None, None, None], x.flip(-1), x)
            drop = torch.rand(size, device=device) < LABEL_DROPOUT
            yield (
                x.contiguous(memory_format=torch.channels_last),
                torch.where(drop, num_classes, data.labels[index]),
            )


class Averages:
    """Exponential moving averages of the parameters, by half-life in thousands of images.

    θ̄ ← β θ̄ + (1 − β) θ, β = 2^(−batch / min(half-life, 5 % of the images seen)).
    """

    def __init__(self, net: nn.Module, half_lives: list[int]) -> None:
        self.source = list(net.parameters())
        self.names = [name for name, _ in net.named_parameters()]
        self.values = {kimg: [p.detach().clone() for p in self.source] for kimg in half_lives}

    @torch.no_grad()
    def update(self, batch: int, seen: int) -> None:
        """Take in the parameters after a step."""
        for kimg, values in self.values.items():
            decay = 0.5 ** (batch / min(1000 * kimg, max(0.05 * seen, 1e-8)))
            torch._foreach_lerp_(values, self.source, 1 - decay)

    def state(self, kimg: int) -> dict[str, Tensor]:
        """Named tensors of one average."""
        return dict(zip(self.names, self.values[kimg], strict=True))


def learning_rate(peak: float, step: int, progress: float, warmup: int, constant: float) -> float:
    """Linear warm-up, constant until `constant` of the budget, then linear to zero."""
    return peak * min(1.0, (step + 1) / warmup) * min(1.0, max(0.0, (1 - progress) / (1 - constant)))


def optimizers(net: nn.Module, kind: str, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Adam on everything, or Muon on the convolutions inside the network and Adam on the rest."""
    inner = [
        p
        for name, p in net.named_parameters()
        if kind == "muon" and p.ndim == 4 and ".enter." not in name and ".leave." not in name
    ]
    chosen = {id(p) for p in inner}
    outer = [p for p in net.parameters() if id(p) not in chosen]
    adam = torch.optim.Adam(outer, lr=lr, betas=(0.9, 0.99), fused=outer[0].is_cuda)
    return [adam, Muon(inner, lr=muon_lr)] if inner else [adam]


def save_checkpoint(
    path: Path, net: nn.Module, averages: Averages, methods: list[torch.optim.Optimizer], step: int
) -> None:
    """Everything needed to go on, as one safetensors file."""
    tensors = {f"net.{name}": p for name, p in net.named_parameters()}
    for kimg in averages.values:
        tensors |= {f"ema.{kimg}.{name}": value for name, value in averages.state(kimg).items()}
    for name, p in net.named_parameters():
        for method in methods:
            if p in method.state:
                tensors |= {f"optimizer.{key}.{name}": value for key, value in method.state[p].items()}
    weights.write(path, tensors, {"step": str(step)})


def load_checkpoint(path: Path, net: nn.Module, averages: Averages, methods: list[torch.optim.Optimizer]) -> int:
    """Restore what `save_checkpoint` wrote; returns the step."""
    tensors = weights.read(path)
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, moment, name = key.split(".", 2)
            moments[name][moment] = value
    names = {id(p): name for name, p in net.named_parameters()}
    try:
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(tensors[f"net.{name}"])
            for method in methods:
                for p in method.param_groups[0]["params"]:
                    method.state[p] = {key: value.to(p.device) for key, value in moments[names[id(p)]].items()}
            for kimg in averages.values:
                for name, value in averages.state(kimg).items():
                    value.copy_(tensors[f"ema.{kimg}.{name}"])
    except KeyError as error:
        raise RuntimeError(f"checkpoint {path}: holds no tensor {error}") from error
    return int(weights.metadata(path)["step"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=sorted({*ARCHITECTURES, "strong"}))
    parser.add_argument("--out", type=Path, required=True, help="folder for log, checkpoint and weights")
    parser.add_argument("--minutes", type=float, help="budget in minutes, counted after compilation")
    parser.add_argument("--steps", type=int, help="budget in steps")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=("adam", "muon"), default="adam")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="peak rate of the convolutions under Muon")
    parser.add_argument("--warmup", type=int, default=1000, help="steps of linear warm-up")
    parser.add_argument("--constant", type=float, default=0.4, help="share of the budget before the rate decays")
    parser.add_argument("--half-lives", type=int, nargs="+", default=[250, 1000], help="of the averages, in kimg")
    parser.add_argument("--images", type=int, help="use the first so many images only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--init", type=Path, nargs="+", help="start from these weights, in one file or in pieces")
    parser.add_argument("--guide", choices=("cifar10",), help="fit to the network of --init guided by this shipped one")
    parser.add_argument("--guided", type=Path, nargs="+", help="weights of the network that is guided; default: --init")
    parser.add_argument("--guidance", type=float, default=1.5, help="scale w of the guide; 1: none")
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.safetensors")
    parser.add_argument("--checkpoint-every", type=float, default=4.0, help="minutes")
    parser.add_argument("--log-every", type=int, default=100, help="steps")
    arguments = parser.parse_args()
    if arguments.minutes is None and arguments.steps is None:
        parser.error("give a budget: --minutes or --steps")
    if arguments.guide is not None and (arguments.init is None or arguments.model == "fashion"):
        parser.error("--guide needs a network of the same images, and --init, the weights to begin from")
    if arguments.guided is not None and arguments.guide is None:
        parser.error("--guided needs --guide, the network that guides it")
    return arguments


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)

    dataset = DATA.get(args.model, args.model)
    data = training_data.load(dataset, "train")
    data = training_data.Dataset(data.images[: args.images].to(device), data.labels[: args.images].to(device).long())
    net = (ARCHITECTURES | {"strong": strong})[args.model]().to(device, memory_format=torch.channels_last)
    if args.init is not None:
        weights.assign(net, pieces.read(args.init), str(args.init[0]))
    loss_of = LOSSES[type(net)]
    if args.guide is not None:
        guided = copy.deepcopy(net)
        weights.assign(guided, pieces.read(args.guided or args.init), "--guided")
        both = (
            other.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
            for other in (guided, zoo.load(args.guide))
        )
        goal = Autoguided(*(torch.compile(one) if args.compile else one for one in both), args.guidance)
        loss_of = partial(edm_loss, goal=goal)
    averages = Averages(net, args.half_lives)
    methods = optimizers(net, args.optimizer, args.lr, args.muon_lr)
    peaks = [method.param_groups[0]["lr"] for method in methods]
    step = load_checkpoint(args.out / "checkpoint.safetensors", net, averages, methods) if args.resume else 0
    forward = torch.compile(net) if args.compile else net

    stop = False

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)

    total, summed = torch.zeros((), device=device), 0
    begun = marked = saved = time.monotonic()
    first, progress = step, 0.0
    with (args.out / "log.jsonl").open("a") as log:
        for x, labels in batches(data, args.batch, FLIPS[dataset], net.num_classes):
            rate = learning_rate(1.0, step, progress, args.warmup, args.constant)
            for method, peak in zip(methods, peaks, strict=True):
                method.param_groups[0]["lr"] = peak * rate
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(net, forward, x, labels)
            net.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for method in methods:
                method.step()
            step += 1
            averages.update(args.batch, step * args.batch)
            total += loss.detach()
            summed += 1

            if step == first + 5:
                total.item()
                begun = marked = saved = time.monotonic()
                total, summed = torch.zeros_like(total), 0
            elapsed = (time.monotonic() - begun) / 60
            progress = max(
                elapsed / args.minutes if args.minutes else 0.0,
                (step - first) / (args.steps - first) if args.steps else 0.0,
            )
            if step % args.log_every == 0 and summed:
                mean = total.item() / summed
                now = time.monotonic()
                record = {
                    "step": step,
                    "images": step * args.batch,
                    "minutes": round((now - begun) / 60, 3),
                    "loss": round(mean, 5),
                    "lr": args.lr * rate,
                    "images_per_s": round(summed * args.batch / max(now - marked, 1e-9)),
                }
                print(json.dumps(record), file=log, flush=True)
                if not math.isfinite(mean):
                    raise RuntimeError(f"loss is {mean} at step {step}: lower --lr")
                marked = now
                total, summed = torch.zeros_like(total), 0
            finished = stop or progress >= 1
            if finished or time.monotonic() - saved > 60 * args.checkpoint_every:
                save_checkpoint(args.out / "checkpoint.safetensors", net, averages, methods, step)
                pieces.write(args.out, "raw", dict(net.named_parameters()))
                for kimg in averages.values:
                    pieces.write(args.out, f"ema-{kimg}", averages.state(kimg))
                saved = marked = time.monotonic()
                total, summed = torch.zeros_like(total), 0
            if finished:
                break
    print(json.dumps({"step": step, "images": step * args.batch, "out": str(args.out)}))


if __name__ == "__main__":
    main()

"""Two processes with a shard each compute what one process computes on the whole batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paper_only.probes import JVP, Exact, Normal
from problems import FLOAT, Nonlinear
from steindiff import GRIDS, SOLVERS, noise, sample
from steindiff._distributed import Rank, gather, mean, ratio_error, shard
from steindiff.bases import Identity
from steindiff.corrections import Relaxation
from steindiff.corrections.alignment import Groups
from steindiff.denoisers import X0
from steindiff.metrics.frechet import Moments
from steindiff.probes import VJP, Antithetic, FiniteDifference
from steindiff.schedules import VP
from steindiff.search import Residuals, products
from steindiff.stein import Balance

SIZES = (5, 2)
RELAXATIONS = {
    "exact": Relaxation(Exact()),
    "vjp": Relaxation(VJP(2)),
    "jvp": Relaxation(JVP(2, Normal())),
    "difference": Relaxation(FiniteDifference(2)),
    "antithetic": Relaxation(VJP(4, Antithetic(Normal()))),
    "per sample": Relaxation(VJP(2), per_sample=True),
}


def results(x: torch.Tensor) -> dict[str, torch.Tensor]:
    levels = GRIDS["logsnr"](VP(t_max=0.7), 4)
    found = {"mean": mean(x[:, 0]), "ratio": torch.stack(ratio_error(x[:, 0], x[:, 1].square() + 1.0))}
    moments = Moments.of(x).all_reduce()
    found |= {"moments": torch.cat([moments.mean[None], moments.scatter]), "count": torch.tensor(moments.count)}
    found["gathered"] = gather(x)
    place = shard(x)
    local = range(place.offset, place.offset + len(x))
    found["group x"] = Groups.of([seed % 2 for seed in range(place.total)], local).means(x.float())
    found["products"] = products([Residuals((x + k).float(), x.new_ones(2)) for k in range(3)])
    for name, relaxation in RELAXATIONS.items():
        for solver in ("dpmpp-2m", "heun"):
            out = sample(X0(Nonlinear()), x, levels, SOLVERS[solver], relaxation)
            found[f"{name} {solver} x"] = out.x
            found[f"{name} {solver} gamma"] = torch.stack([row["gamma"] for row in out.statistics[:-1]])
    out = sample(X0(Nonlinear()), x, levels, SOLVERS["dpmpp-2m"], Balance(Identity((6,)), torch.full((1, 1), 0.5)))
    found["balance x"] = out.x
    found["balance rho"] = torch.stack([torch.stack([row["rho"], row["error"]]) for row in out.statistics])
    return found


def start() -> torch.Tensor:
    return noise(range(sum(SIZES)), (6,), GRIDS["logsnr"](VP(t_max=0.7), 4)[0], FLOAT)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SIZES))
    offset = sum(SIZES[:rank])
    part = start()[offset : offset + SIZES[rank]]
    assert shard(part) == (offset, sum(SIZES))
    torch.save(results(part), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # threads of torch may outlive the group for a moment, and abort an interpreter that ends in it


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = str(tmp_path_factory.mktemp("gloo"))
    mp.spawn(work, args=(folder,), nprocs=len(SIZES))
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(len(SIZES))]


def test_gamma_and_samples_do_not_depend_on_how_the_batch_is_sharded(shards: list[dict[str, torch.Tensor]]):
    whole = results(start())
    assert set(shards[0]) == set(whole)
    for name, expected in whole.items():
        parts = [part[name] for part in shards]
        if name.endswith("x"):
            found = torch.cat(parts)
        elif "per sample" in name:
            found = torch.cat(parts, dim=1)
        else:
            assert torch.equal(parts[0], parts[1]), name
            found = parts[0]
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12, msg=name)
        exact = ("mean", "ratio", "gathered", "count", "group x", "products")
        assert name not in exact or torch.equal(found, expected), name


def test_without_a_process_group_the_batch_is_the_whole():
    x = torch.arange(6.0).reshape(3, 2)
    assert shard(x) == (0, 3)
    assert float(mean(x[:, 0])) == 2.0


def test_shares_make_the_whole_and_differ_by_one_at_most():
    for count in range(12):
        for world in range(1, 6):
            parts = [list(Rank(rank, world).slice(range(count))) for rank in range(world)]
            assert [item for part in parts for item in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_process_alone_is_not_asked_and_no_device_waited_for():
    assert shard(torch.empty(3, 2, device="meta")) == (0, 3)

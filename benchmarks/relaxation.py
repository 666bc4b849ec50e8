"""The paper's Stein relaxation, measured: coefficients, samples, probes, cost, Lipschitz constants.

    python benchmarks/relaxation.py gamma decay digits cases ablation
    python benchmarks/relaxation.py cost lipschitz network

Each section writes `results/relaxation_<section>.json`, and a plot beside it where there is one. Digits are
scikit-learn's 1,797 images of 8×8 pixels in [−1, 1] with their exact denoiser in float64; the network is the embedded
CIFAR-10 model in float32 on one CPU thread. Fréchet distances on digits are of pixels, against all the data.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

from steindiff import GRIDS, SCHEDULES, SOLVERS, noise, sample, zoo
from steindiff._files import write_json
from steindiff.averages import OverBatch, PerSample
from steindiff.corrections import (
    Consistency,
    Correction,
    Likelihood,
    Matched,
    Normalised,
    Plain,
    Relaxation,
    TopK,
    Unclamped,
)
from steindiff.denoisers import Denoiser, EDMDenoiser, Empirical
from steindiff.diagnostics import (
    certificate,
    decay,
    fine_flow,
    ideal_gammas,
    lipschitz,
    plot_certificate,
    plot_decay,
    plot_gammas,
    plot_lipschitz,
    sampled_gammas,
)
from steindiff.grids import Karras, LogSNR
from steindiff.levels import Levels
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.probes import JVP, VJP, Adaptive, Analytic, FiniteDifference, Normal, Rademacher, memory_per_sample
from steindiff.solvers import DPMSolverMultistep, Solver
from steindiff.tableau import Step

RESULTS = Path(__file__).parent / "results"
SEED = 0
HOSTS = ("ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh1-2", "heun")
SAFE = "dpmpp-3m without lower_order_final"
EXTRA: dict[str, Solver] = {SAFE: DPMSolverMultistep(3, lower_order_final=False)}

Record = dict[str, Any]


def digits() -> Tensor:
    return torch.from_numpy(load_digits().data) / 8.0 - 1.0


def levels_for(solver: Solver, grid: str, schedule: str, nfe: int) -> Levels | None:
    try:
        return solver.levels(GRIDS[grid], SCHEDULES[schedule], nfe)
    except ValueError:
        return None  # a solver of several stages cannot spend every budget


def literal(**options: Any) -> Relaxation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the warning says is what is measured here
        return Relaxation(bounds=Unclamped(), **options)


def numbers(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]


def gamma_section() -> list[Record]:
    """Direct, Stein and oracle γ on digits: under the theorems' assumptions, and on a sampler's own states."""
    data, records = digits(), []
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for schedule in ("edm", "vp"):
        for name in HOSTS:
            levels = GRIDS["logsnr"](SCHEDULES[schedule], 6)
            for states, compare in (("ideal", ideal_gammas), ("sampled", sampled_gammas)):
                generator = torch.Generator().manual_seed(SEED)
                denoiser = Empirical(data)
                flow = fine_flow(denoiser, levels.schedule, 24)
                rows = compare(denoiser, data[:400], levels, SOLVERS[name], generator, probe=VJP(2), flow=flow)
                records += [
                    {"schedule": schedule, "solver": name, "states": states, "step": i + 1, **asdict(row)}
                    for i, row in enumerate(rows)
                ]
                if (schedule, name) == ("edm", "dpmpp-2m"):
                    plot_gammas(rows, axes[int(states == "sampled")])
                    axes[int(states == "sampled")].set_title(f"{states} states")
    figure.savefig(RESULTS / "relaxation_gamma.png", dpi=120)
    return records


def corrections() -> dict[str, Correction]:
    return {
        "plain": Plain(),
        "clamped": Relaxation(VJP(2)),
        "clamped, analytical": Relaxation(Analytic()),
        "clamped, adaptive": Relaxation(Adaptive()),
        "clamped, 3 neediest": Relaxation(VJP(2), TopK(3)),
        "clamped, per sample": Relaxation(VJP(2), average=PerSample()),
        "clamped, normalised": Relaxation(VJP(2), coordinates=Normalised()),
        "clamped, normalised, per sample": Relaxation(VJP(2), average=PerSample(), coordinates=Normalised()),
        "literal": literal(probe=VJP(2)),
        "consistency, literal weight": Consistency(Relaxation(VJP(2)), weight=Likelihood()),
        "consistency, per dimension": Consistency(Relaxation(VJP(2))),
        "consistency, matched": Consistency(Relaxation(VJP(2)), interpolation=Matched()),
    }


def digits_section(samples: int = 400) -> list[Record]:
    """Samples of digits: every correction, solver, grid and budget."""
    data, records = digits(), []
    denoiser, reference = Empirical(data), Moments.of(data)
    chosen = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED))[:samples]]
    records.append(
        {"correction": "real digits", "samples": samples, "frechet": frechet_distance(Moments.of(chosen), reference)}
    )
    for schedule, grid in (("edm", "edm"), ("edm", "logsnr"), ("vp", "logsnr")):
        for solver_name in (*HOSTS, SAFE):
            solver = EXTRA.get(solver_name) or SOLVERS[solver_name]
            for nfe in (3, 5, 9, 19):  # odd: what Heun can spend
                levels = levels_for(solver, grid, schedule, nfe)
                if levels is None:
                    continue
                x = noise(range(samples), (64,), levels[0], torch.float64)
                for name, correction in corrections().items():
                    record: Record = {
                        "schedule": schedule,
                        "grid": grid,
                        "solver": solver_name,
                        "nfe": nfe,
                        "correction": name,
                        "samples": samples,
                    }
                    try:
                        out = sample(denoiser, x, levels, solver, correction)
                        record["frechet"] = frechet_distance(Moments.of(out.x), reference)
                        gammas = [row["gamma"].double().mean() for row in out.statistics if row.get("active")]
                        record["gamma"] = numbers(gammas)
                        record["backward_passes"] = out.backward_passes
                    except RuntimeError as error:
                        record["error"] = str(error)
                    records.append(record)
    return records


def ablation_section(samples: int = 400, repeats: int = 4) -> list[Record]:
    """How many probes: γ and its spread over probe seeds, and the samples, on digits."""
    data, records = digits(), []
    denoiser, reference = Empirical(data), Moments.of(data)
    levels = GRIDS["logsnr"](SCHEDULES["edm"], 5)
    x = noise(range(samples), (64,), levels[0], torch.float64)
    modes = {
        "batch, rademacher": (Rademacher(), OverBatch()),
        "batch, normal": (Normal(), OverBatch()),
        "per sample, rademacher": (Rademacher(), PerSample()),
    }
    for solver_name in ("dpmpp-2m", SAFE):
        solver = EXTRA.get(solver_name) or SOLVERS[solver_name]
        plain = frechet_distance(Moments.of(sample(denoiser, x, levels, solver).x), reference)
        for mode, (directions, average) in modes.items():
            for m in (1, 2, 3, 5, 10):
                runs = [
                    sample(denoiser, x, levels, solver, Relaxation(VJP(m, directions), average=average, seed=seed))
                    for seed in range(repeats)
                ]
                distances = torch.tensor([frechet_distance(Moments.of(run.x), reference) for run in runs])
                # γ = 1 on the first two steps, so the third starts at the same state: only the probes differ.
                third = torch.stack([run.statistics[2]["optimum"] for run in runs])
                records.append(
                    {
                        "solver": solver_name,
                        "nfe": 5,
                        "mode": mode,
                        "probes": m,
                        "samples": samples,
                        "repeats": repeats,
                        "plain": plain,
                        "frechet": float(distances.mean()),
                        "frechet_spread": float(distances.std()),
                        "gamma": numbers(row["gamma"].double().mean() for row in runs[0].statistics[:-1]),
                        "third_gamma_spread": float(third.std(0).mean() / third.mean()),
                    }
                )
    return records


def cases_section() -> list[Record]:
    """Two cases apart, on digits: VP run in batches of 100, and multistep solvers without their usual safeguard.

    The batches show what the noise of γ does to a user of the paper's own coordinates. The safeguard is a last step to
    σ = 0 together with a lower order at the end.
    """
    data, records = digits(), []
    denoiser, reference = Empirical(data), Moments.of(data)
    modes: dict[str, Correction] = {
        "plain": Plain(),
        "clamped": Relaxation(VJP(2)),
        "clamped, normalised": Relaxation(VJP(2), coordinates=Normalised()),
    }
    cases: list[tuple[str, str, Solver, Levels]] = [
        (f"vp, {steps} steps", name, SOLVERS[name], GRIDS["logsnr"](SCHEDULES["vp"], steps))
        for steps in (5, 10)
        for name in ("ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh1-2")
    ]
    for order in (2, 3):
        for grid, bare in (("edm", Karras(to_zero=False)), ("logsnr", LogSNR(to_zero=False))):
            solver = DPMSolverMultistep(order, lower_order_final=False)
            cases.append((f"no safeguard, {grid} grid, 5 steps", f"dpmpp-{order}m", solver, bare(SCHEDULES["edm"], 5)))
    for case, name, solver, levels in cases:
        for mode, correction in modes.items():
            runs = [
                sample(denoiser, noise(range(k, k + 100), (64,), levels[0], torch.float64), levels, solver, correction)
                for k in range(0, 600, 100)
            ]
            record: Record = {"case": case, "solver": name, "correction": mode, "samples": 600, "batch": 100}
            record["frechet"] = frechet_distance(Moments.of(torch.cat([run.x for run in runs])), reference)
            if mode != "plain":
                record["first_gamma"] = numbers(run.statistics[0]["optimum"] for run in runs)
            records.append(record)
    return records


def network() -> Denoiser:
    return EDMDenoiser(zoo.load("cifar10"))


def cost_section(batch: int = 2, repeats: int = 3) -> list[Record]:
    """What a run of 5 evaluations costs on the network, in CPU time of one thread; the least of several runs."""
    denoiser, records = network(), []
    levels = GRIDS["logsnr"](SCHEDULES["edm"], 5)
    x = noise(range(batch), (3, 32, 32), levels[0])
    modes: dict[str, Correction] = {"plain": Plain()}
    modes |= {f"full, {m} VJP probes": Relaxation(VJP(m)) for m in (1, 2, 3, 5, 10)}
    modes |= {
        "analytical": Relaxation(Analytic()),
        "adaptive (sigma < 1), 5 VJP probes": Relaxation(Adaptive()),
        "1 neediest step, 5 VJP probes": Relaxation(VJP(5), TopK(1)),
        "full, 5 JVP probes": Relaxation(JVP(5)),
        "full, 6 differences": Relaxation(FiniteDifference(6)),
        "consistency over analytical": Consistency(Relaxation(Analytic())),
    }
    step = Step(SOLVERS["ddim"].tableau(levels, 0), denoiser)
    memory = memory_per_sample(step, x)
    seconds = {name: float("inf") for name in modes}
    sample(denoiser, x, levels, SOLVERS["dpmpp-2m"])  # the first run also sets up the kernels
    for _ in range(repeats):  # all modes in turn, so that a busy machine slows none of them alone
        for name, correction in modes.items():
            start = time.process_time()
            sample(denoiser, x, levels, SOLVERS["dpmpp-2m"], correction)
            seconds[name] = min(seconds[name], time.process_time() - start)
    for name, correction in modes.items():
        out = sample(denoiser, x, levels, SOLVERS["dpmpp-2m"], correction)
        records.append(
            {
                "mode": name,
                "batch": batch,
                "nfe": out.nfe,
                "network_calls": out.network_calls,
                "backward_passes": out.backward_passes,
                "cpu_seconds": seconds[name],
                "ratio": seconds[name] / seconds["plain"],
                "graph_bytes_per_sample": memory,
            }
        )
        print(f"{name}: {seconds[name]:.2f} s, {records[-1]['ratio']:.2f}×", flush=True)
    return records


def lipschitz_section() -> list[Record]:
    """Local Lipschitz constants along runs of DPM-Solver++ 2M: Fig. 4 of the paper, on what we have."""
    records = []
    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    subjects: list[tuple[str, Callable[[], Denoiser], tuple[int, ...], int, torch.dtype, tuple[int, int]]] = [
        ("digits", lambda: Empirical(digits()), (64,), 8, torch.float64, (40, 20)),
        ("cifar10", network, (3, 32, 32), 1, torch.float32, (10, 6)),
    ]
    for row, (subject, build, shape, batch, dtype, iterations) in enumerate(subjects):
        denoiser = build()
        for column, (nfe, most) in enumerate(zip((6, 100), iterations, strict=True)):
            for grid in ("edm", "logsnr"):
                levels = GRIDS[grid](SCHEDULES["edm"], nfe)
                every = 10 if (subject, nfe) == ("cifar10", 100) else 1
                found = lipschitz(
                    denoiser,
                    noise(range(batch), shape, levels[0], dtype),
                    levels,
                    SOLVERS["dpmpp-2m"],
                    torch.Generator().manual_seed(SEED),
                    every=every,
                    iterations=most,
                    tolerance=0.02,
                )
                records.append(
                    {
                        "subject": subject,
                        "grid": grid,
                        "nfe": nfe,
                        "samples": batch,
                        "sigma": numbers(found.sigma),
                        "transition_median": numbers(found.transition.median(1).values),
                        "transition_max": numbers(found.transition.amax(1)),
                        "denoiser_max": numbers(found.denoiser.amax(1)),
                        "noise_max": numbers(found.noise.amax(1)),
                        "expanding": int((found.transition.amax(1) > 1.0).sum()),
                        "measured": len(found.sigma),
                        "peak": float(found.transition.max()),
                    }
                )
                if every == 1:
                    rows = certificate(levels, found.denoiser.amax(1).tolist(), found.noise.amax(1).tolist())
                    records[-1]["certified"] = sum(rows.holds)
                    records[-1]["noise_certified"] = sum(bound < 1.0 for bound in rows.noise_bound)
                plot_lipschitz(found, panels[row][column], f"{grid} grid")
                panels[row][column].set_title(f"{subject}, {nfe} evaluations")
                if (subject, nfe, grid) == ("cifar10", 6, "edm"):
                    single = Figure(figsize=(5, 4), layout="constrained")
                    plot_certificate(rows, single.subplots())
                    single.savefig(RESULTS / "relaxation_certificate.png", dpi=120)
                print(subject, grid, nfe, "peak", round(records[-1]["peak"], 2), flush=True)
    figure.savefig(RESULTS / "relaxation_lipschitz.png", dpi=120)
    return records


def decay_section() -> list[Record]:
    """E_k, b_k, c_k, ρ_k on digits: the theorem's own update, the plain solver, the clamped relaxation."""
    data, records = digits(), []
    figure = Figure(figsize=(5, 4), layout="constrained")
    levels = GRIDS["edm"](SCHEDULES["edm"], 6)
    for name in HOSTS:
        for mode, correction in (("direct gamma", None), ("plain", Plain()), ("clamped", Relaxation(VJP(5)))):
            generator = torch.Generator().manual_seed(SEED)
            found = decay(Empirical(data), data[:1000], levels, SOLVERS[name], generator, correction)
            records.append(
                {
                    "solver": name,
                    "mode": mode,
                    **asdict(found),
                    "gamma": numbers(found.gamma),
                    "rho": numbers(found.rho),
                    "product": found.product,
                    "bound": found.bound,
                }
            )
            if (name, mode) == ("dpmpp-2m", "direct gamma"):
                plot_decay(found, figure.subplots())
    figure.savefig(RESULTS / "relaxation_decay.png", dpi=120)
    return records


def network_section(batch: int = 2) -> list[Record]:
    """γ on the CIFAR-10 network, and how far it moves the samples; the literal form until the guard stops it."""
    denoiser, records = network(), []
    for grid in ("edm", "logsnr"):
        for solver_name in ("ddim", "dpmpp-2m", SAFE):
            solver = EXTRA.get(solver_name) or SOLVERS[solver_name]
            for nfe in (5, 8):
                levels = solver.levels(GRIDS[grid], SCHEDULES["edm"], nfe)
                x = noise(range(batch), (3, 32, 32), levels[0])
                plain = sample(denoiser, x, levels, solver).x
                modes: dict[str, Relaxation] = {"clamped": Relaxation(VJP(1)), "literal": literal(probe=VJP(1))}
                if nfe == 5:
                    modes["clamped, per sample"] = Relaxation(VJP(1), average=PerSample())
                    modes["clamped, analytical"] = Relaxation(Analytic())
                for mode, correction in modes.items():
                    record: Record = {"grid": grid, "solver": solver_name, "nfe": nfe, "mode": mode, "batch": batch}
                    try:
                        out = sample(denoiser, x, levels, solver, correction)
                        record["gamma"] = numbers(row["gamma"].mean() for row in out.statistics[:-1])
                        record["optimum"] = numbers(row["optimum"].mean() for row in out.statistics[:-1])
                        record["moved"] = float((out.x - plain).square().mean().sqrt() / plain.square().mean().sqrt())
                    except RuntimeError as error:
                        record["error"] = str(error)
                    records.append(record)
                    print(record, flush=True)
    return records


SECTIONS: dict[str, Callable[[], list[Record]]] = {
    "gamma": gamma_section,
    "digits": digits_section,
    "ablation": ablation_section,
    "cases": cases_section,
    "decay": decay_section,
    "cost": cost_section,
    "lipschitz": lipschitz_section,
    "network": network_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(f"sections: {name!r}; allowed are {', '.join(SECTIONS)}")
        start = time.perf_counter()
        records = SECTIONS[name]()
        write_json(
            RESULTS / f"relaxation_{name}.json",
            {
                "seed": SEED,
                "device": platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "seconds": round(time.perf_counter() - start, 1),
                "records": records,
            },
        )
        print(f"{name}: {len(records)} records in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

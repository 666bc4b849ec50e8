"""The paper's Stein relaxation on data whose denoiser is exact, and its cost: coefficients, samples, probes.

    python benchmarks/relaxation.py gamma decay digits cases ablation lipschitz
    python benchmarks/relaxation.py cost

Each section writes `results/relaxation_<section>.json`, and a plot beside it where there is one. Digits are
scikit-learn's 1,797 images of 8×8 pixels in [−1, 1] with their exact denoiser in float64; the network of `cost` is the
embedded CIFAR-10 model in float32 on one CPU thread. Fréchet distances on digits are of pixels, against all the data.
The paper's experiments on networks are in `benchmarks/paper.py`.
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

from networks.mixture import Empirical
from paper_only.activation import TopK
from paper_only.coefficients import coupled_gammas, decay, fine_flow, ideal_gammas, plot_comparison, plot_decay
from paper_only.probes import JVP, Normal
from paper_only.verdicts import difference
from steindiff import GRIDS, SCHEDULES, SOLVERS, noise, sample, zoo
from steindiff._files import write_json
from steindiff.corrections import (
    Clamped,
    Correction,
    FirstSteps,
    Plain,
    Relaxation,
    Unclamped,
)
from steindiff.corrections.consistency import Consistency, Matched, PerDimension
from steindiff.corrections.relaxation import GROWTH
from steindiff.denoisers import Denoiser, EDMDenoiser
from steindiff.diagnostics import (
    certificate,
    lipschitz,
    plot_lipschitz,
)
from steindiff.grids import Karras, LogSNR
from steindiff.levels import Levels
from steindiff.metrics.frechet import Distance, Moments, distance, frechet_distance
from steindiff.probes import VJP, Adaptive, Analytic, FiniteDifference, Rademacher, memory_per_sample
from steindiff.sampler import levels_for as budget
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
        return budget(solver, GRIDS[grid], SCHEDULES[schedule], nfe)
    except ValueError:
        return None  # a solver of several stages cannot spend every budget


def literal(growth: float | None = None, **options: Any) -> Relaxation:
    """Algorithm 1 to the letter: without a guard unless asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the warning says is what is measured here
        return Relaxation(bounds=Unclamped(growth=growth), **options)


def numbers(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]


def gamma_section() -> list[Record]:
    """Direct, Stein and oracle γ on ideal states of digits, and Stein γ on a sampler's own states."""
    data, records = digits(), []
    figure = Figure(figsize=(6, 4), layout="constrained")
    denoiser = Empirical(data)
    for schedule in ("edm", "vp"):
        for name in HOSTS:
            levels = GRIDS["logsnr-to-zero"](SCHEDULES[schedule], 6)
            flow = fine_flow(denoiser, levels.schedule, 24)
            run = (denoiser, data[:400], levels, SOLVERS[name])
            ideal = ideal_gammas(*run, torch.Generator().manual_seed(SEED), probe=VJP(2), flow=flow)
            sampled = coupled_gammas(*run, torch.Generator().manual_seed(SEED), probe=VJP(2))
            for i, (row, own) in enumerate(zip(ideal, sampled, strict=True)):
                apart = abs(own.gamma - row.stein) / (own.error**2 + row.stein_error**2) ** 0.5
                records.append(
                    {
                        "schedule": schedule,
                        "solver": name,
                        "step": i + 1,
                        **asdict(row),
                        "gap": row.gap,
                        "improves": row.improves(row.stein),
                        "sampled": own.gamma,
                        "sampled_error": own.error,
                        "apart": apart,
                        "sampled_improves": row.improves(own.gamma),
                    }
                )
            if (schedule, name) == ("edm", "dpmpp-2m"):
                plot_comparison(ideal, figure.subplots(), sampled)
    figure.savefig(RESULTS / "relaxation_gamma.png", dpi=120)
    return records


def corrections() -> dict[str, Correction]:
    full = VJP(2)
    return {
        "plain": Plain(),
        "clamped": Relaxation(full),
        "clamped, maximum 1.02": Relaxation(full, bounds=Clamped(maximum=1.02)),
        "clamped, maximum 1.1": Relaxation(full, bounds=Clamped(maximum=1.1)),
        "clamped, maximum 1.5": Relaxation(full, bounds=Clamped(maximum=1.5)),
        "clamped, analytical": Relaxation(Analytic()),
        "clamped, adaptive": Relaxation(Adaptive()),
        "clamped, first 3 steps": Relaxation(full, FirstSteps(3)),
        "clamped, 3 neediest": Relaxation(full, TopK(3)),
        "clamped, per sample": Relaxation(full, per_sample=True),
        "clamped, normalised": Relaxation(full, normalised=True),
        "clamped, normalised, per sample": Relaxation(full, per_sample=True, normalised=True),
        "literal, guarded": literal(growth=GROWTH, probe=full),
        "literal": literal(probe=full),
        "literal, per sample": literal(probe=full, per_sample=True),
        "consistency": Consistency(Relaxation(full)),
        "consistency, per dimension": Consistency(Relaxation(full), weight=PerDimension()),
        "consistency, matched": Consistency(Relaxation(full), interpolation=Matched(), weight=PerDimension()),
    }


def digits_section(samples: int = 400) -> list[Record]:
    """Samples of digits: every correction, solver, grid and budget, each beside the plain solver's from its seeds."""
    data, records = digits(), []
    denoiser, reference = Empirical(data), Moments.of(data)
    chosen = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED))[:samples]]
    records.append({"correction": "real digits", "samples": samples, "frechet": distance(chosen, reference).value})
    for schedule, grid in (("edm", "edm-to-zero"), ("edm", "logsnr-to-zero"), ("vp", "logsnr-to-zero")):
        for solver_name in (*HOSTS, SAFE):
            solver = EXTRA.get(solver_name) or SOLVERS[solver_name]
            for nfe in (3, 5, 9, 19):  # odd: what Heun can spend
                levels = levels_for(solver, grid, schedule, nfe)
                if levels is None:
                    continue
                x = noise(range(samples), (64,), levels[0], torch.float64)
                plain: Distance | None = None
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
                        found = distance(out.x, reference)
                        plain = plain or found
                        gap = difference(found, plain)
                        record |= {
                            "frechet": found.value,
                            "frechet_error": found.error,
                            "difference": gap.value,
                            "difference_error": gap.error,
                            "verdict": gap.verdict(plain.value),
                            "gamma": numbers(r["gamma"].double().mean() for r in out.statistics if r.get("active")),
                            "backward_passes": out.backward_passes,
                        }
                    except RuntimeError as error:
                        record["error"] = str(error)
                    records.append(record)
    return records


def ablation_section(samples: int = 400, repeats: int = 4) -> list[Record]:
    """How many probes: γ and its spread over probe seeds, and the samples, on digits."""
    data, records = digits(), []
    denoiser, reference = Empirical(data), Moments.of(data)
    levels = GRIDS["logsnr-to-zero"](SCHEDULES["edm"], 5)
    x = noise(range(samples), (64,), levels[0], torch.float64)
    modes = {
        "batch, rademacher": (Rademacher(), False),
        "batch, normal": (Normal(), False),
        "per sample, rademacher": (Rademacher(), True),
    }
    for solver_name in ("dpmpp-2m", SAFE):
        solver = EXTRA.get(solver_name) or SOLVERS[solver_name]
        plain = frechet_distance(Moments.of(sample(denoiser, x, levels, solver).x), reference)
        for mode, (directions, alone) in modes.items():
            for m in (1, 2, 3, 5, 10):
                runs = [
                    sample(denoiser, x, levels, solver, Relaxation(VJP(m, directions), per_sample=alone, seed=seed))
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
    full = VJP(2)
    modes: dict[str, Correction] = {
        "plain": Plain(),
        "clamped": Relaxation(full),
        "clamped, per sample": Relaxation(full, per_sample=True),
        "clamped, normalised": Relaxation(full, normalised=True),
        "clamped, normalised, per sample": Relaxation(full, per_sample=True, normalised=True),
    }
    cases: list[tuple[str, str, Solver, Levels]] = [
        (f"vp, {steps} steps", name, SOLVERS[name], GRIDS["logsnr-to-zero"](SCHEDULES["vp"], steps))
        for steps in (5, 10)
        for name in ("ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh1-2", "heun")
    ]
    for order in (2, 3):
        for grid, bare in (("edm", Karras(to_zero=False)), ("logsnr", LogSNR(to_zero=False))):
            solver = DPMSolverMultistep(order, lower_order_final=False)
            cases.append((f"no safeguard, {grid} grid, 5 steps", f"dpmpp-{order}m", solver, bare(SCHEDULES["edm"], 5)))
    for case, name, solver, levels in cases:
        plain: Distance | None = None
        for mode, correction in modes.items():
            runs = [
                sample(denoiser, noise(range(k, k + 100), (64,), levels[0], torch.float64), levels, solver, correction)
                for k in range(0, 600, 100)
            ]
            found = distance(torch.cat([run.x for run in runs]), reference)
            plain = plain or found
            gap = difference(found, plain)
            record: Record = {
                "case": case,
                "solver": name,
                "nfe": runs[0].nfe,
                "correction": mode,
                "samples": 600,
                "batch": 100,
                "frechet": found.value,
                "frechet_error": found.error,
                "difference": gap.value,
                "difference_error": gap.error,
                "verdict": gap.verdict(plain.value),
            }
            if mode != "plain":
                record["first_gamma"] = numbers(run.statistics[0]["optimum"].mean() for run in runs)
            records.append(record)
    return records


def network() -> Denoiser:
    return EDMDenoiser(zoo.load("cifar10"))


def cost_section(batch: int = 2, repeats: int = 3) -> list[Record]:
    """What a run of 5 evaluations costs on the network, in CPU time of one thread; the least of several runs."""
    denoiser, records = network(), []
    levels = GRIDS["logsnr-to-zero"](SCHEDULES["edm"], 5)
    x = noise(range(batch), (3, 32, 32), levels[0])
    modes: dict[str, Correction] = {"plain": Plain()}
    modes |= {f"full, {m} VJP probes": Relaxation(VJP(m)) for m in (1, 2, 3, 5, 10)}
    modes |= {
        "analytical": Relaxation(Analytic()),
        "adaptive (sigma < 1), 5 VJP probes": Relaxation(Adaptive()),
        "first 3 steps, 5 VJP probes": Relaxation(VJP(5), FirstSteps(3)),
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
    """Local Lipschitz constants along runs of DPM-Solver++ 2M on digits: Fig. 4 with an exact denoiser."""
    records = []
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    denoiser = Empirical(digits())
    for panel, nfe in zip(panels, (6, 100), strict=True):
        for grid in ("edm-to-zero", "logsnr-to-zero"):
            levels = GRIDS[grid](SCHEDULES["edm"], nfe)
            x = noise(range(8), (64,), levels[0], torch.float64)
            generator = torch.Generator().manual_seed(SEED)
            found = lipschitz(denoiser, x, levels, SOLVERS["dpmpp-2m"], generator, iterations=40, tolerance=0.01)
            worst = (found.denoiser.amax(1).tolist(), found.noise.amax(1).tolist())
            rows = certificate(levels, *worst)
            records.append(
                {
                    "subject": "digits",
                    "grid": grid,
                    "nfe": nfe,
                    "samples": len(x),
                    "sigma": numbers(found.sigma),
                    "transition_median": numbers(found.transition.median(1).values),
                    "transition_max": numbers(found.transition.amax(1)),
                    "denoiser_max": numbers(worst[0]),
                    "noise_max": numbers(worst[1]),
                    "expanding": int((found.transition.amax(1) > 1.0).sum()),
                    "measured": len(found.sigma),
                    "peak": float(found.transition.max()),
                    "certified": sum(rows.holds),
                    "noise_certified": sum(bound < 1.0 for bound in rows.noise_bound),
                }
            )
            plot_lipschitz(found, panel, f"{grid} grid")
            panel.set_title(f"digits, {nfe} evaluations")
            print(grid, nfe, "peak", round(records[-1]["peak"], 2), flush=True)
    figure.savefig(RESULTS / "relaxation_lipschitz.png", dpi=120)
    return records


def decay_section() -> list[Record]:
    """E_k, b_k, c_k, ρ_k on digits: the theorem's own update, the plain solver, the clamped relaxation."""
    data, records = digits(), []
    figure = Figure(figsize=(5, 4), layout="constrained")
    levels = GRIDS["edm-to-zero"](SCHEDULES["edm"], 6)
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


SECTIONS: dict[str, Callable[[], list[Record]]] = {
    "gamma": gamma_section,
    "digits": digits_section,
    "ablation": ablation_section,
    "cases": cases_section,
    "decay": decay_section,
    "cost": cost_section,
    "lipschitz": lipschitz_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(f"sections must be of {', '.join(SECTIONS)}, got {name!r}")
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

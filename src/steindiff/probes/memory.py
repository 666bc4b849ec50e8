r"""How much memory a linearised pass takes, and how many samples fit into a given amount."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from steindiff.denoisers.base import Denoiser
from steindiff.probes._pullback import by_autograd
from steindiff.probes.base import flat_step, restricted
from steindiff.tableau import Step

GRADIENTS = 0.25
"""What pulling one direction back holds beside the graph, as a share of it. Measured on U-Nets: 0.16 to 0.18."""

_MEASURED: WeakKeyDictionary[Denoiser, dict[tuple[object, ...], int]] = WeakKeyDictionary()


def memory_per_sample(step: Step, x: Tensor, together: int = 1) -> int:
    """Bytes one more sample costs in a VJP: what autograd keeps for it, and the gradients on their way back.

    What is kept is counted, on any device, as the difference between the first two samples of `x`, `(B, *)`, and the
    first alone; so weights, which all samples share, are left out. Makes one evaluation of the step for each.

    Args:
        step: the step to linearise.
        x: its states; of a single sample all that is kept is counted.
        together: directions pulled back in one pass.
    """
    graph = _saved(step, x, 2) - _saved(step, x, 1) if len(x) > 1 else _saved(step, x, 1)
    return round(graph * (1 + GRADIENTS * together))


def fitting(step: Step, x: Tensor, memory: int, together: int = 1) -> int:
    """How many samples of `x`, `(B, *)`, a VJP may linearise at a time within `memory` bytes: at least one.

    Measured once for a denoiser and a kind of step. Where it cannot be measured, one.
    """
    if len(x) == 1:
        return 1
    known = _MEASURED.setdefault(step.denoiser, {})
    key = (len(step.tableau.stages), x.shape[1:], x.dtype, x.device, together)
    if key not in known:
        try:
            known[key] = memory_per_sample(step, x, together)
        except RuntimeError:
            known[key] = memory
    return min(len(x), max(1, memory // max(1, known[key])))


def _saved(step: Step, x: Tensor, samples: int) -> int:
    """Bytes autograd keeps for the backward pass of `step` at the first `samples` of `x`."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    part = slice(0, samples)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        pulled = by_autograd(partial(flat_step, restricted(step, part, len(x))), x[part])
    del pulled
    return sum(storages.values())

"""Processes started by `torchrun`: how they meet, which of them takes which GPU, and how each names itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)
"""How long a process waits for the others; `torchrun` ends them all where one fails."""


LOOK = 1.0
"""Seconds between two looks at whether `torchrun` is still there."""


def launched() -> bool:
    """Whether `torchrun` started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def speaker() -> str:
    """Who says something: the program, or which of its processes."""
    return f"steindiff, process {os.environ['RANK']}" if launched() else "steindiff"


def own_gpu(count: int) -> str:
    """The GPU of this process, `cuda` or by number."""
    if not launched():
        return "cuda"
    index, processes = int(os.environ["LOCAL_RANK"]), os.environ["LOCAL_WORLD_SIZE"]
    if index >= count:
        raise ValueError(f"nproc_per_node must be at most {count} here, the number of GPUs, got {processes}")
    return f"cuda:{index}"


def end_with(parent: int) -> None:
    """End this process once its parent is gone: a `torchrun` that is killed cannot end its workers.

    What was written is whole at any moment, so nothing is lost by ending at once.
    """
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGKILL)


def meet(backend: str, **group: Any) -> None:
    """Form a process group and wait for the others: one with nothing to do would else be gone before all reached it."""
    dist.init_process_group(backend, **group)
    dist.all_reduce(torch.zeros(1))  # on the CPU; a barrier would take a GPU where there is one


@contextmanager
def process_group() -> Iterator[None]:
    """Inside, processes started by `torchrun` form one group: NCCL for tensors on GPUs, gloo for those on CPUs."""
    if not launched():
        yield
        return
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    store, rank, world = next(dist.rendezvous("env://"))
    # After a restart by torchrun the store still holds the addresses of those that died.
    store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    meet(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()

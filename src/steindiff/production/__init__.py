"""Many images: written in shards, resumable after a kill at any moment, over one process or many."""

from steindiff._progress import Listener
from steindiff.production.generating import GenerateResult, Shards, generate
from steindiff.production.manifest import Manifest
from steindiff.production.shards import Images, Shard, ShardStatus, to_npz, to_png, verify

__all__ = [
    "GenerateResult",
    "Images",
    "Listener",
    "Manifest",
    "Shard",
    "ShardStatus",
    "Shards",
    "generate",
    "to_npz",
    "to_png",
    "verify",
]

"""Many images: written in shards, resumable after a kill at any moment, over one process or many."""

from steindiff.production.export import to_npz, to_png
from steindiff.production.making import Produced, produce
from steindiff.production.manifest import Manifest
from steindiff.production.shards import Condition, Images, Shard, verify

__all__ = ["Condition", "Images", "Manifest", "Produced", "Shard", "produce", "to_npz", "to_png", "verify"]

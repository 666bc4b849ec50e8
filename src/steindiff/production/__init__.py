"""Many images: written in shards, resumable after a kill at any moment, over one process or many."""

from steindiff.production.making import Produced, produce
from steindiff.production.manifest import Manifest
from steindiff.production.shards import Condition, Images, Shard, verify

__all__ = ["Condition", "Images", "Manifest", "Produced", "Shard", "produce", "verify"]

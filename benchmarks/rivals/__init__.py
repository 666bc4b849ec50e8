"""Rivals that are here to be measured only: they need training, per-dimension weights or extra noise."""

"""Rivals, here to be measured only."""

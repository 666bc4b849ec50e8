"""What sampling costs, measured: implementations side by side in one run, ratios with their spread.

`python -m bench` in this folder runs it, also where only torch, safetensors, rich and Pillow are installed.
"""

from bench.scope import SCOPES, Scope
from bench.sections import SECTIONS, bench
from bench.timing import Cost, Spread, Timing, interleaved

__all__ = ["SCOPES", "SECTIONS", "Cost", "Scope", "Spread", "Timing", "bench", "interleaved"]

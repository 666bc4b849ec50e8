"""What sampling costs, measured: implementations side by side in one run, ratios with their spread.

`python -m bench` is `steindiff bench` for machines that have torch and little else.
"""

from bench.scope import SCOPES, Scope
from bench.sections import SECTIONS, bench
from bench.timing import Cost, Spread, Timing, interleaved

__all__ = ["SCOPES", "SECTIONS", "Cost", "Scope", "Spread", "Timing", "bench", "interleaved"]

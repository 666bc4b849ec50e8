"""Lets ComfyUI load a plain clone of this repository in custom_nodes/. The Python package is src/steindiff."""

import sys
from importlib.util import find_spec
from pathlib import Path

if "folder_paths" in sys.modules:  # inside ComfyUI, and nowhere else: pytest imports this file too
    if find_spec("steindiff") is None:
        sys.path.append(str(Path(__file__).parent / "src"))

    from .comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

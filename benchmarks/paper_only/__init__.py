"""Parts of the paper that only its reproduction measures."""

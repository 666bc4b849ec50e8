"""The commands, one file each: a function `command`, named after its file, and its `EXAMPLES`."""

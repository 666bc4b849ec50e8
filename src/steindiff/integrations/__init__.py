"""Where people already sample. Each module adapts one host and imports it only when it is imported itself."""

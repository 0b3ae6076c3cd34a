"""Calls of tools in the turns of a model: one syntax for each family, and the reader of a turn."""

"""The mathematics: advantage estimators and losses, as pure functions of tensors and plain values.

Each family of functions is a plain dict from a name to a declaration: the function, which maps one
object of inputs to its result, the settings that it reads, and what it needs. `find.py` finds a
function of the user's own file.
"""

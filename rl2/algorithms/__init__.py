"""The mathematics: advantage estimators and losses, as pure functions of tensors and plain values.

Each family of functions is a plain dict from name to function. A function asks by parameter name
for what it needs; `config/by_name.py` says how, and finds a function of the user's own file.
"""

"""Integer division that rounds up."""


def ceil_div(number: int, divisor: int) -> int:
    """Returns number / divisor, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `number`."""
    return ceil_div(number, multiple) * multiple

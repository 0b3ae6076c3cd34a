"""Errors that a user can mend, where people look for them."""

import json
import os
import sys
import time
from pathlib import Path


def report_error(text: str) -> None:
    """Prints the message, and lets the report of torchrun, which follows, end with it.

    That report has some 40 lines of its own, so what stands above it is easily overlooked.
    """
    print(text, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))

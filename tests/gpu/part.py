"""Runs one part in this process: part.py FILE FUNCTION ARGUMENTS FIGURES LIMIT.

The runner kills it after LIMIT seconds; shortly before, it prints where all its threads stand. The
exit status is 0 if the part passed, 77 if it was skipped, anything else if it failed.
"""

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

SECONDS_TO_PRINT = 3.0  # the threads


def main(path: str, function: str, arguments: str, figures: str, limit: str) -> int:
    os.environ["RL2_GPU_FIGURES"] = figures
    faulthandler.dump_traceback_later(max(float(limit) - SECONDS_TO_PRINT, 1.0), file=2)
    from figures import Skip, record

    try:
        module = importlib.import_module(Path(path).stem)
        getattr(module, function)(*json.loads(arguments))
    except Skip as reason:
        record(reason=str(reason))
        return 77
    except Exception as error:
        traceback.print_exc()
        record(reason=f"{type(error).__name__}: {str(error).strip()}"[:500])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

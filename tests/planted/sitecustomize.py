"""Plants the fault of tests/prove_faults.py that RL2_PLANTED names in every process of rl2."""

import os
import sys

name = os.environ.get("RL2_PLANTED")
if name and "resource_tracker" not in str(sys.orig_argv):
    import prove_faults

    prove_faults.plant(prove_faults.FAULTS[name], setattr)

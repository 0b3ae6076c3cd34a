"""Plants the fault of tests/prove_faults.py that RL2_PLANTED names in every Python process."""

import os

if name := os.environ.get("RL2_PLANTED"):
    import prove_faults

    prove_faults.plant(prove_faults.FAULTS[name], setattr)

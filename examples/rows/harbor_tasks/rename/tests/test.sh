#!/bin/bash
if [ "$(cat /app/one.md /app/two.md)" = "$(printf '1\n2')" ] && [ ! -e /app/one.txt ] && [ ! -e /app/two.txt ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi

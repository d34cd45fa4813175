#!/bin/bash
# A node's part of ray.sh: Ray's head on the first node, on the others whoever joins it, for as long as the job lasts.
set -euo pipefail
if [[ "$SLURM_NODEID" == 0 ]]; then
    exec ray start --head --port="$RAY_HEAD_PORT" --include-dashboard=false --disable-usage-stats --block
fi
for _ in {1..60}; do  # the head may come later
    ray health-check --address="$RAY_HEAD" >/dev/null 2>&1 && break
    sleep 2
done
exec ray start --address="$RAY_HEAD" --disable-usage-stats --block

#!/bin/bash
# Started by ray.sh on every node: Ray's head on the first node, a worker on the others, until the job ends.
set -euo pipefail
if [[ "$SLURM_NODEID" == 0 ]]; then
    exec ray start --head --port="$RAY_HEAD_PORT" --include-dashboard=false --disable-usage-stats --block
fi
for _ in {1..60}; do  # wait for the head
    ray health-check --address="$RAY_HEAD" >/dev/null 2>&1 && break
    sleep 2
done
exec ray start --address="$RAY_HEAD" --disable-usage-stats --block

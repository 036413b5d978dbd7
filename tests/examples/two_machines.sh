#!/bin/sh
# Two machines with this package: the target's GPU in one, the draft's in the other.
#   two_machines.sh target            on the first; it prints how the second joins
#   two_machines.sh draft HEAD        on the second; HEAD is the first one's address
#   two_machines.sh serve TARGET DRAFT    on the first: serve a pair of models
set -eu
export $(python -c 'from deployments.local.environment import SERVE_ENVIRONMENT as e; print(*map("=".join, e.items()))')
export RAY_AUTH_MODE=token
case "$1" in
target)
    ray get-auth-token --generate > /dev/null
    ray start --head --labels role=target
    echo "copy ~/.ray/auth_token to the other machine; there: two_machines.sh draft $(hostname -I | cut -d' ' -f1)"
    ;;
draft)
    ray start --address "$2:6379" --labels role=draft
    ;;
serve)
    serve run --address 127.0.0.1:6379 deployments:app target_model="$2" draft_model="$3" \
        label_selector='{"target": {"role": "target"}, "draft": {"role": "draft"}}'
    ;;
esac

#!/usr/bin/env bash
# Runs headrank with the given arguments, in an environment that it makes the first time: bash scripts/run.sh effrank
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment ""
exec "$python" -m headrank "$@"

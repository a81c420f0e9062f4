#!/usr/bin/env bash
# Lints, checks types and runs the tests, in an environment that it makes the first time. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment "[dev]"
cd "$top"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest "$@"

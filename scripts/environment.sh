# Sourced: makes .venv at the top of the checkout with headrank and the extras named in $1, unless it is there already.
# Without an NVIDIA GPU, PyTorch's version is pinned to one whose CPU build is at hand; with one, a torch that Python has is used.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$top/.venv/bin/python"

make_environment() {
    local extras=$1 constraints="$top/scripts/constraints.txt" stamp options=()
    stamp="$top/.venv/.made-for$extras-$(cat "$top/pyproject.toml" "$constraints" | sha256sum | cut -c1-16)"
    [ -e "$stamp" ] && return 0
    local base
    base=$(command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrank needs Python 3.11 or newer; $base is older" >&2; return 1; }
    if nvidia-smi >/dev/null 2>&1; then
        base=$(command -v python3)
        options=(--system-site-packages)
        constraints=$(mktemp)
        grep -v '^torch==' "$top/scripts/constraints.txt" >"$constraints"
    fi
    echo "Making $top/.venv ..." >&2
    [ -x "$python" ] || "$base" -m venv "${options[@]}" "$top/.venv"
    "$python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" --editable "$top$extras" 2>&1 | { grep -v '^WARNING: Location' || true; } >&2
    "$python" -c 'import headrank.config'
    touch "$stamp"
}

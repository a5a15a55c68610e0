#!/bin/sh
# Lower a model to ExecuTorch (XNNPACK) in an environment of its own, run it, and compare it with torch.
set -eu

case "${1:-}" in
    -h | --help)
        cat <<'TEXT'
usage: scripts/executorch_recipe.sh [MODEL] [OUT.pte] [SIZE]

MODEL is a timm or sima_* name (default sima_xcit_mini_p4_64_relu, whose weights come with the package; others have
random ones), OUT the file to write (default runs/model.pte), SIZE the image side (default 64). ExecuTorch brings many
packages of its own, so it gets its own environment: EXECUTORCH_ENV (default runs/executorch-env), about 6 GB with torch.
TEXT
        exit 0 ;;
esac
environment=${EXECUTORCH_ENV:-runs/executorch-env}
uv=${UV:-$(command -v uv || echo .tools/uv/bin/uv)}
if [ ! -x "$environment/bin/python" ]; then
    "$uv" venv --quiet --python 3.11 "$environment"
    "$uv" pip install --quiet --python "$environment/bin/python" "executorch>=1.5" -e .
fi
exec "$environment/bin/python" scripts/executorch_recipe.py \
    "${1:-sima_xcit_mini_p4_64_relu}" "${2:-runs/model.pte}" "${3:-64}"

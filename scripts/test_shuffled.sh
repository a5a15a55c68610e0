#!/usr/bin/env bash
# The command-line tests in a different environment than `make test`: whole files in a process, in a new random order
# each time (pytest prints the seed), and a temporary folder with a long path. The slowest ones, which train, are left
# out.
set -euo pipefail
cd "$(dirname "$0")/.."
TMPDIR="$(mktemp -d)/$(printf 'long%.0s' {1..35})"
export TMPDIR
mkdir "$TMPDIR"
grep -rl --include="*.py" CliRunner tests | grep -v -e miniature -e detect -e distill -e finetune -e stopping -e resume -e sharded | xargs .venv/bin/pytest --dist loadfile --shuffle "$RANDOM"

#!/usr/bin/env bash
# What the pages need beyond Python: Chromium for their tests, onnxruntime-web for the model in the browser.
set -euo pipefail
cd "$(dirname "$0")/.."
home=.tools/web
files=(ort.wasm.bundle.min.mjs ort-wasm-simd-threaded.wasm)

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    echo "chromium and chromedriver are here"
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive  # nobody is there to answer
    apt-get update --quiet=2 -o Acquire::http::Timeout=30
    apt-get install --yes --quiet=2 --no-install-recommends -o Acquire::http::Timeout=30 chromium chromium-driver
else
    echo "note: the tests of the pages need chromium and chromedriver (Debian: apt-get install chromium" \
        "chromium-driver, as root); without them they are skipped"
fi

if [ -f "$home/${files[0]}" ] && [ -f "$home/${files[1]}" ]; then
    echo "onnxruntime-web is here: $home"
    exit
fi
if ! command -v npm >/dev/null; then
    echo "error: onnxruntime-web comes with npm, which is not installed: install Node.js and run this again" >&2
    exit 1
fi
mkdir -p "$home"
work=$(mktemp -d "$home/work.XXXXXX")  # beside, so that each file arrives whole
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent onnxruntime-web@1.30 >/dev/null && tar -xzf onnxruntime-web-*.tgz)
for file in "${files[@]}"; do
    mv "$work/package/dist/$file" "$home/"
done
echo "onnxruntime-web is in $home"

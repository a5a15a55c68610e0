#!/bin/sh
# Run an exported model on emulated 64-bit ARM and compare it with this machine. Correctness only: times mean nothing.
set -eu

usage() {
    cat <<'TEXT'
usage: scripts/arm64_check.sh FILE.onnx [MORE.onnx ...]

Unpacks Debian's arm64 Python and ONNX Runtime's arm64 wheels into a folder, runs every file there under qemu-user,
and compares the logits with those of this machine. Needs Debian or Ubuntu and:

    apt-get install qemu-user-static debootstrap

Root is needed the first time, by debootstrap. Nothing is installed into the system.

    ARM64_ROOT   the folder (default: runs/arm64, about 600 MB), kept for the next time
    PYTHON       Python with sima-attn[onnx] (default: .venv/bin/python)
    UV           uv (default: from PATH, or .tools/uv/bin/uv)
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    "") usage >&2; exit 2 ;;
esac
root=${ARM64_ROOT:-runs/arm64}
python=${PYTHON:-.venv/bin/python}
uv=${UV:-$(command -v uv || echo .tools/uv/bin/uv)}
for tool in qemu-aarch64-static debootstrap; do
    command -v "$tool" >/dev/null || { echo "error: $tool is missing: apt-get install qemu-user-static debootstrap" >&2; exit 2; }
done
for file in "$@"; do
    [ -f "$file" ] || { echo "error: there is no file $file" >&2; exit 2; }
done

if [ ! -e "$root/ready" ]; then
    rm -rf "$root"
    mkdir -p "$root"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3 bookworm "$root/debian"
    # Unpacking is enough: configuring packages would need their own programs to run.
    for package in "$root"/debian/var/cache/apt/archives/*.deb; do
        dpkg -x "$package" "$root/debian"
    done
    # ONNX Runtime reads these at start, and would find the processor of this machine: a Cortex-A72, as in a Pi 4.
    mkdir -p "$root/debian/proc" "$root/debian/sys/devices/system/cpu"
    printf 'processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n' \
        >"$root/debian/proc/cpuinfo"
    echo 0 >"$root/debian/sys/devices/system/cpu/possible"
    echo 0 >"$root/debian/sys/devices/system/cpu/present"
    "$uv" pip install --quiet --python-platform aarch64-unknown-linux-gnu --python-version 3.11 --only-binary :all: \
        --target "$root/packages" numpy onnxruntime
    touch "$root/ready"
fi

for file in "$@"; do
    "$python" scripts/arm64_logits.py "$file" "$root/here.npy"
    PYTHONPATH="$root/packages" qemu-aarch64-static -cpu cortex-a72 -L "$root/debian" \
        "$root/debian/usr/bin/python3.11" scripts/arm64_logits.py "$file" "$root/there.npy"
    "$python" scripts/arm64_logits.py --compare "$file" "$root/here.npy" "$root/there.npy"
done

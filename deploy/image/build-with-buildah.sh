#!/bin/sh
# Builds the CPU image where there is no Docker, starts it once, has it answer and says how large it is. Needs root,
# Debian's packages buildah and debootstrap, and 10 GB in FOLDER, which keeps the base, the image and its layers.
#
#   deploy/image/build-with-buildah.sh FOLDER [ARGUMENT OF buildah build]...
#
# for example with an index of its own: FOLDER --build-arg TORCH_INDEX=https://mirror.example/whl/cpu
# Behind a proxy that answers for HTTPS, CERTIFICATES names a folder with its certificate (*.crt), which goes into the base.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
port=${PORT:-8099}
base=localhost/debian:bookworm
image=localhost/ropewalk:cpu
export BUILDAH_ISOLATION=chroot

storage() {
    buildah --storage-driver vfs --root "$folder/storage" --runroot "$folder/run" "$@"
}

if [ ! -e "$folder/base.tar" ]; then
    rm -rf "$folder/base"
    debootstrap --variant=minbase bookworm "$folder/base"
    [ -z "${CERTIFICATES:-}" ] ||
        install -D --mode 644 --target-directory "$folder/base/usr/local/share/ca-certificates" "$CERTIFICATES"/*.crt
    tar --create --numeric-owner --directory "$folder/base" --file "$folder/base.tar" .
    rm -rf "$folder/base"
fi
if ! storage inspect --type image "$base" >/dev/null 2>&1; then
    container=$(storage from scratch)
    storage add --quiet "$container" "$folder/base.tar" /
    storage commit --quiet --rm "$container" "$base"
fi

# Docker's format, for OCI's has no health check.
storage build --format docker --target cpu --build-arg BASE="$base" --tag "$image" "$@" "$root"

container=$(storage from "$image")
server=
clean_up() {
    [ -z "$server" ] || kill -- "-$server" 2>/dev/null || true
    wait # buildah reports that the server was killed, which is so
    storage rm "$container" >/dev/null
}
trap clean_up EXIT
trap 'exit 130' INT TERM
# In a process group of its own: a signal to buildah alone does not reach the server.
setsid buildah --storage-driver vfs --root "$folder/storage" --runroot "$folder/run" \
    run --user 54321:0 --env ROPEWALK_PORT="$port" "$container" -- ropewalk-entrypoint serve &
server=$!
ask() {
    python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).status)' \
        "http://127.0.0.1:$port/$1" 2>/dev/null
}
tries=60
until ask ready >/dev/null; do
    tries=$((tries - 1))
    if [ "$tries" -eq 0 ] || ! kill -0 "$server" 2>/dev/null; then
        echo "the server did not become ready" >&2
        exit 1
    fi
    sleep 5
done
echo "/health: $(ask health)"
echo "The sea is$(python3 -c 'import json, sys, urllib.request as u
body = json.dumps({"prompt": "The sea is", "max_tokens": 8, "temperature": 0}).encode()
request = u.Request(sys.argv[1], body, {"content-type": "application/json"})
print(json.load(u.urlopen(request, timeout=60))["text"])' "http://127.0.0.1:$port/generate")"
storage images --format 'size: {{.Size}}' "$image"

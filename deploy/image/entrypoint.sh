#!/bin/sh
# Lets the server find what its image brings (the default model, the compiled operators) in a cache folder that may be
# a fresh volume, or one that an older image filled; then becomes the server, so that signals reach that.
set -eu
umask 0002 # the next container on this volume may have another UID and has the same group

for entry in "$IMAGE_CACHE"/models/* "$IMAGE_CACHE"/operators-*; do
    link=$ROPEWALK_CACHE/${entry#"$IMAGE_CACHE"/}
    if [ -e "$entry" ] && [ ! -e "$link" ]; then
        mkdir -p "$(dirname "$link")" && ln -sfn "$entry" "$link" || echo "not linked: $link" >&2
    fi
done
exec ropewalk "$@"

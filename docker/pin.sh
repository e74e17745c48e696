#!/bin/sh
# Writes into an env file which images are meant, by their digests, as they are in the registry now. A tag alone may come
# to mean something else: neither the Dockerfile nor compose.yaml takes one.
#
#   sh docker/pin.sh docker/.env
set -eu
file=$1
pin() {
    digest=$(docker buildx imagetools inspect "$2" --format '{{.Manifest.Digest}}')
    case $digest in
        sha256:*) ;;
        *) echo "pin.sh: the registry gave no digest of $2" >&2; exit 1 ;;
    esac
    fresh=$(mktemp "$file.XXXXXX")
    grep -v "^$1=" "$file" > "$fresh" || true
    echo "$1=$digest" >> "$fresh"
    mv "$fresh" "$file"
}
pin BASE_DIGEST "python:${PYTHON:-3.11}-slim"
pin REDIS_DIGEST redis:7-alpine
pin POSTGRES_DIGEST postgres:16-alpine
pin MINIO_DIGEST minio/minio
pin MINIO_CLIENT_DIGEST minio/mc

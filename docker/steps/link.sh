#!/bin/sh
# Has a virtual environment's Python find the product's folder:  docker/steps/link.sh VENV FOLDER
set -eu
[ $# = 2 ] || { echo "usage: link.sh VENV FOLDER" >&2; exit 2; }
echo "$2" >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tangram-chat.pth"

#!/usr/bin/env bash
# Everything that a machine without a network needs: wheels, models, checksums, an installer.
#
# usage: deploy/bundle.sh DIR REQUIREMENT [MODEL...]
#   deploy/bundle.sh bundle cpuserve smollm2:135m Qwen/Qwen3-4B
#   deploy/bundle.sh bundle dist/cpuserve-0.1.0-*.whl
# Run it on a machine of the same architecture and Python version. Copy DIR, and run there
#   DIR/install.sh [PREFIX]     # a virtual environment, default /opt/cpuserve
# It compares every file with SHA256SUMS, and stops if one is missing, damaged or not listed.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
directory=$1 requirement=$2
shift 2
[ ! -e "$directory" ] || { echo "$directory exists: give a new directory" >&2; exit 2; }
mkdir -p "$directory/wheels" "$directory/models"

python3 -m pip download --quiet --dest "$directory/wheels" --only-binary=:all: "$requirement"
if [ $# -gt 0 ]; then
  # A temporary installation downloads the models, as the server would.
  temporary=$(mktemp -d)
  trap 'rm -rf "$temporary"' EXIT
  python3 -m venv "$temporary"
  "$temporary/bin/pip" install --quiet --no-index --find-links "$directory/wheels" cpuserve
  for model in "$@"; do
    CPUSERVE_CACHE=$directory/models HF_HOME=$directory/models/huggingface \
      "$temporary/bin/cpuserve" pull "$model"
  done
fi

cat >"$directory/install.sh" <<'INSTALLER'
#!/usr/bin/env bash
# usage: install.sh [PREFIX]   installs cpuserve into PREFIX without a network
set -euo pipefail
cd "$(dirname "$0")"
prefix=${1:-/opt/cpuserve}
listed=$(cut -c67- SHA256SUMS | LC_ALL=C sort)
found=$(find . -type f ! -name SHA256SUMS | LC_ALL=C sort)
[ "$listed" = "$found" ] || {
  echo "the files differ from SHA256SUMS; nothing was installed:" >&2
  diff <(echo "$listed") <(echo "$found") >&2 || true
  exit 1
}
sha256sum --check --quiet SHA256SUMS || {
  echo "a file is damaged: copy the bundle again; nothing was installed" >&2
  exit 1
}
python3 -m venv "$prefix"
"$prefix/bin/pip" install --quiet --no-index --find-links wheels cpuserve
cp -r models "$prefix/models"
echo "Start the server with"
echo "  HF_HUB_OFFLINE=1 CPUSERVE_CACHE=$prefix/models HF_HOME=$prefix/models/huggingface \\"
echo "    $prefix/bin/cpuserve serve MODEL"
INSTALLER
chmod +x "$directory/install.sh"
(cd "$directory" && find . -type f ! -name SHA256SUMS -print0 | LC_ALL=C sort -z |
  xargs -0 sha256sum >SHA256SUMS)
echo "$directory: $(du -sh "$directory" | cut -f1), $(wc -l <"$directory/SHA256SUMS") files"

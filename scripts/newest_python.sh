#!/usr/bin/env bash
# Installs the package and runs its tests on a newer Python than the machine has: that of Debian 13 (3.13), with the
# newest jax that pip finds for it. Needs root, debootstrap and about 4 GB of disk; Debian comes from the machine's own
# mirror, and proxies, certificates, hosts and pip's settings are the machine's too. torch is not installed: tests
# that need it are skipped.
#
#   scripts/newest_python.sh [--short] [--root DIR] [--mirror URL]
#
#   --short    the quickstart of PPO and of RLOO cut short, and every third test file, others each day; otherwise all tests
#   --root     where Debian is installed, and left for the next time; a temporary folder that is removed otherwise
#   --mirror   of Debian; the machine's own by default, else debootstrap's
#
# Everything is mounted in a mount namespace of this script's own, so that no mount outlives it however it ends.
set -euo pipefail

suite=trixie
short= root= mirror=
while [ $# -gt 0 ]; do
  case $1 in
    --short) short=1 ;;
    --root) root=${2:?--root needs a folder} && shift ;;
    --mirror) mirror=${2:?--mirror needs a URL} && shift ;;
    *) echo "unknown option $1: scripts/newest_python.sh [--short] [--root DIR] [--mirror URL]" >&2 && exit 2 ;;
  esac
  shift
done
[ "$(id -u)" = 0 ] || { echo "needs root, for debootstrap and chroot" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "needs debootstrap: apt-get install debootstrap" >&2; exit 2; }

if [ -z "${NEWEST_PYTHON_UNSHARED:-}" ]; then
  if [ -z "$root" ]; then
    root=$(mktemp -d)
    trap 'rm -rf --one-file-system "$root"' EXIT
  fi
  mkdir -p "$root"
  NEWEST_PYTHON_UNSHARED=1 unshare --mount --pid --fork --kill-child "${BASH_SOURCE[0]}" \
    --root "$(realpath "$root")" ${short:+--short} ${mirror:+--mirror "$mirror"}
  exit
fi
trap 'exit 130' INT # the first process of a namespace ignores signals that it has no handler for
trap 'exit 143' TERM

step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ---------------------------------------------------------------------------------------------------- Debian

if [ -x "$root/usr/bin/python3" ] && [ ! -e "$root/debootstrap" ]; then
  step "the Debian in $root"
else
  step "Debian $suite in $root"
  [ -z "$(ls -A "$root")" ] || { echo "$root is neither empty nor a complete root: remove it" >&2; exit 2; }
  if [ -z "$mirror" ]; then
    mirror=$(apt-get indextargets --format '$(ORIGIN)/$(LABEL) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
      sed -n 's|^Debian/Debian ||p' | head -n 1)
  fi
  eval "$(apt-config shell proxy Acquire::http::Proxy secure_proxy Acquire::https::Proxy)"
  login=$(mktemp -d) # a home for wget, with which debootstrap downloads: what apt logs in with
  trap 'rm -rf "$login"' EXIT
  for file in /etc/apt/auth.conf /etc/apt/auth.conf.d/*.conf; do
    [ ! -f "$file" ] || (umask 077 && sed -E 's#(machine +)[a-z+]+://#\1#; s#(machine +[^/ ]+)/[^ ]*#\1#' "$file" >>"$login/.netrc")
  done
  http_proxy=${http_proxy:-${proxy:-}} https_proxy=${https_proxy:-${secure_proxy:-}} HOME=$login \
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" ${mirror:+"$mirror"} \
    >"$login/log" 2>&1 || { tail -n 40 "$login/log" >&2; exit 1; }
fi

# ---------------------------------------------------------------------------------------------------- the machine's settings

cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"

# pip's settings, of its files and of the environment, as environment variables: NAME=VALUE, each ended by a null.
mapfile -d '' settings < <(python3 - <<'PYTHON'
import ast, os, re, subprocess, sys

kept = re.compile(r"PIP_\w+|(https?|ftp|all|no)_proxy|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE", re.IGNORECASE)
settings = {}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
for line in listed.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.partition(".")
    if section in ("global", "install"):
        settings["PIP_" + name.replace("-", "_").upper()] = ast.literal_eval(value)
settings |= {name: value for name, value in os.environ.items() if kept.fullmatch(name)}
settings.pop("PIP_CACHE_DIR", None)  # its own, in the root
for name, value in settings.items():
    print(f"{name}={value}", end="\0")
PYTHON
)
has_content() { if [ -d "$1" ]; then [ -n "$(ls -A "$1")" ]; else [ -s "$1" ]; fi; }
# Local files and folders that they name are seen at the same place, and not written to. Pages of an index on the disk
# link to files beside it.
for setting in "${settings[@]}"; do
  for word in ${setting#*=}; do
    path=$word
    if [[ $word == file:///*/* ]]; then path=$(dirname "${word#file://}"); fi
    if [[ $path == /?* ]] && has_content "$path" && ! has_content "$root$path"; then
      if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}" && touch "$root$path"; fi
      mount --bind "$path" "$root$path"
      mount -o remount,bind,ro "$root$path"
    fi
  done
done

rm -rf --one-file-system "$root/checkout"
mkdir "$root/checkout"
tar -C "$top" --exclude=./.git --exclude=.venv --exclude=./runs --exclude=__pycache__ -cf - . | tar -C "$root/checkout" -xf -

# ---------------------------------------------------------------------------------------------------- in the root

read -r -d '' inside <<'INSIDE' || true
step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }
failed=0 results=()

# attempt NAME COMMAND...: what it ended with goes into the results; after a failure the next one runs all the same.
attempt() {
  local name=$1 began=$SECONDS status=ok last
  step "$name"
  shift
  "$@" 2>&1 </dev/null | tee /tmp/attempt.log || { status=FAILED; failed=1; }
  last=$(grep -E '^=*[ ]?[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s' /tmp/attempt.log | tail -n 1 | tr -d =) || true
  results+=("$status: $name: ${last:-$((SECONDS - began))s}")
}

cd /checkout
quickstart=$(awk '/^<!-- quickstart -->$/ { found = 1 } found && /^```/ { if (inside) exit; inside = 1; next } inside' README.md)
[ -n "$quickstart" ] || { echo "README.md has no command behind <!-- quickstart -->" >&2; exit 1; }
cut="--sft.max_steps 4 --reward.max_steps 4"
attempt "quickstart, short" bash -euo pipefail -c "$quickstart $cut --ppo.total_episodes 256"
[ $failed = 0 ] || exit 1
attempt "RLOO, short" .venv/bin/python -m rlhf_jax.train --config quickstart_rloo.py $cut --rloo.total_episodes 256

step "what the tests need, but torch"
.venv/bin/python - >/tmp/requirements.txt <<'PYTHON'
import importlib.metadata, re

for requirement in importlib.metadata.requires("rlhf_jax"):
    wanted, _, condition = requirement.partition(";")
    if 'extra == "test"' in condition and re.match(r"[\w-]+", wanted).group() not in ("torch", "trl", "peft"):
        print(wanted)
PYTHON
.venv/bin/pip install -q -r /tmp/requirements.txt
.venv/bin/python - <<'PYTHON'
import importlib.metadata, importlib.util, platform

assert importlib.util.find_spec("torch") is None, "torch has come with another package"
names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "datasets", "qwix", "pytest")
print(f"Python {platform.python_version()}", *(f"{name} {importlib.metadata.version(name)}" for name in names), sep="\n")
PYTHON

if [ "$1" = short ]; then
  part=$((10#$(date +%j) % 3)) # of the day of the year, which begins with zeros
  mapfile -t files < <(find tests -name 'test_*.py' | sort | awk -v part="$part" 'NR % 3 == part')
  attempt "tests, part $((part + 1)) of 3" .venv/bin/python -m pytest -q "${files[@]}"
else
  attempt "tests" .venv/bin/python -m pytest -q
  attempt "tests: runs" .venv/bin/python -m pytest -q -m runs
  attempt "tests: processes" .venv/bin/python -m pytest -q -m processes -n 0
fi

step "compiling for GPUs"
.venv/bin/pip install -q '.[gpu-aot]'
attempt "dry runs for GPUs" .venv/bin/python -m pytest -q -m gpu_aot -n 0 tests/dry_run/test_topologies_gpus.py -k dry_run_says

step "done"
printf '%s\n' "${results[@]}"
exit $failed
INSIDE
chroot "$root" /usr/bin/env -i "${settings[@]}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  HOME=/root LANG=C.UTF-8 CI="${CI:-}" JAX_PLATFORMS=cpu PIP_DISABLE_PIP_VERSION_CHECK=1 \
  bash -euo pipefail -c "$inside" inside "${short:+short}"

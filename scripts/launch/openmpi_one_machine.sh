#!/usr/bin/env bash
# Runs the mpirun command of docs/scaling.md on this machine: two processes of one run, on the CPU. Returns its status.
#
#   scripts/launch/openmpi_one_machine.sh
#
# Installs Debian's or Ubuntu's openmpi-bin if there is no mpirun and it runs as root. `python` must have rlhf_jax. The
# run folder is temporary.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() { echo "openmpi_one_machine: $*" >&2; exit 2; }

[ $# = 0 ] || fail "'$1': it takes no options"
if ! command -v mpirun >/dev/null; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "no mpirun: install Open MPI 4 (Debian: openmpi-bin)"
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends openmpi-bin
fi
command=$(awk '/^<!-- openmpi -->$/ {on = 1} on && /^mpirun/ {p = 1} p {print; if (!/\\$/) exit}' "$root/docs/scaling.md")
[ -n "$command" ] || fail "docs/scaling.md has no command under <!-- openmpi -->"

# Allow root, and two processes on one core.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export JAX_PLATFORMS=cpu PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python -c 'import rlhf_jax' || fail "\`python\` cannot import rlhf_jax: activate its environment, or set PATH"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ln -s "$root/scripts" "$work/scripts"
cd "$work"
mpirun --version | head -n 1
echo "$command"
status=0
bash -c "$command" 2>&1 | tee run.log || status=$?
# Only process 0 prints the stage; twice means two separate runs in one folder.
if [ "$status" = 0 ] && ! { [ -f runs/*/ppo/finished.json ] && [ "$(grep -ac '== ppo ->' run.log)" = 1 ]; }; then
  status=1
  echo "openmpi_one_machine: mpirun returned 0, but this was not one run that finished" >&2
fi
[ "$status" = 0 ] && echo "the run finished" || echo "the run exited with code $status" >&2
exit "$status"

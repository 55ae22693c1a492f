#!/usr/bin/env bash
# SLURM on this one machine, and the job of docs/scaling.md in it: two tasks of one run, on the CPU.
#
#   scripts/launch/slurm_one_machine.sh          installs and starts SLURM, submits the job, waits; returns the job's status
#   scripts/launch/slurm_one_machine.sh start    installs and starts SLURM only
#   scripts/launch/slurm_one_machine.sh stop     stops it and removes its files
#
# For Debian or Ubuntu, as root, in a container or a machine of its own: it writes /etc/slurm/slurm.conf. It needs no
# systemd, no cgroups and no host name that resolves. `python` is the one with rlhf_jax. SLURM's state and logs are in
# RLHF_JAX_SLURM_DIR (/tmp/rlhf_jax_slurm); the run's folder is a temporary one and removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dir=${RLHF_JAX_SLURM_DIR:-/tmp/rlhf_jax_slurm}
conf=/etc/slurm/slurm.conf
mine="# written by rlhf_jax scripts/launch/slurm_one_machine.sh"

fail() { echo "slurm_one_machine: $*" >&2; exit 2; }

stop_daemon() { # PIDFILE: ends that daemon and waits for it
  [ -s "$1" ] || return 0
  local pid
  pid=$(cat "$1")
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  kill -9 "$pid" 2>/dev/null || true
  rm -f "$1"
}

stop() {
  if [ -f "$conf" ] && head -1 "$conf" | grep -qxF "$mine"; then
    scancel --full --user "$(id -un)" 2>/dev/null || true
    stop_daemon "$dir/slurmd.pid"
    stop_daemon "$dir/slurmctld.pid"
    rm -f "$conf"
  fi
  stop_daemon "$dir/munged.pid"
  rm -rf "$dir"
}

start() {
  [ "$(id -u)" = 0 ] || fail "run it as root: it installs packages and writes $conf"
  if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    command -v apt-get >/dev/null || fail "no apt-get here: install slurmctld, slurmd, srun and munge yourself"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends slurm-wlm munge
  fi
  if [ -f "$conf" ] && ! head -1 "$conf" | grep -qxF "$mine"; then
    fail "$conf is there and is not ours: this machine has a SLURM already, submit scripts/launch/train.sbatch to it"
  fi
  stop
  install -d -m 755 "$dir" "$dir/state" "$dir/spool" "$(dirname "$conf")"

  # munge signs SLURM's messages: a key, a socket and a log of our own
  install -d -m 755 -o munge -g munge "$dir/munge"
  (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
  chown munge:munge "$dir/munge/key"
  su -s /bin/sh munge -c "munged --key-file=$dir/munge/key --socket=$dir/munge/socket --log-file=$dir/munge/log \
    --pid-file=$dir/munge/pid --seed-file=$dir/munge/seed"
  ln -s munge/pid "$dir/munged.pid"

  # Two tasks must fit: with one CPU, SLURM is told of two. The node is called localhost, since jax's coordinator is the
  # first name of SLURM_STEP_NODELIST, which has to resolve; slurmd -N takes that name in place of the host's own.
  local cpus
  cpus=$(nproc)
  cat >"$conf" <<CONF
$mine
ClusterName=one_machine
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$((cpus > 2 ? cpus : 2)) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  slurmctld
  slurmd -N localhost
  for _ in $(seq 100); do
    [ "$(sinfo --noheader --format=%t 2>/dev/null)" = idle ] && break
    sleep 0.2
  done
  if [ "$(sinfo --noheader --format=%t)" != idle ]; then
    tail -n 20 "$dir/slurmctld.log" "$dir/slurmd.log" >&2
    fail "the node did not come up; above are the last lines of $dir/slurmctld.log and slurmd.log"
  fi
  echo "$(slurmctld -V) is up: $(sinfo --noheader --format='%n, %c CPUs, %t')"
}

submit() { # the command under <!-- slurm --> of docs/scaling.md, in a temporary folder, so that the run is a new one
  local command work status=0
  command=$(awk '/^<!-- slurm -->$/ {on = 1} on && /^sbatch/ {p = 1} p {print; if (!/\\$/) exit}' docs/scaling.md)
  [ -n "$command" ] || fail "docs/scaling.md has no command under <!-- slurm -->"
  export JAX_PLATFORMS=cpu PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  python -c 'import rlhf_jax' || fail "\`python\` lacks what rlhf_jax needs: activate its environment, or set PATH"
  work=$(mktemp -d)
  ln -s "$PWD/scripts" "$work/scripts"
  echo "$command"
  (cd "$work" && SBATCH_WAIT=1 bash -c "$command") || status=$?
  cat "$work"/*.log
  # Only the first process of a run says which stage it is in: twice would be two runs, side by side in one folder.
  if [ "$status" = 0 ] && ! { [ -f "$work"/runs/*/ppo/finished.json ] &&
    [ "$(cat "$work"/*.log | grep -ac '== ppo ->')" = 1 ]; }; then
    status=1
    echo "slurm_one_machine: sbatch returned 0, but this was not one run that finished" >&2
  fi
  rm -rf "$work"
  [ "$status" = 0 ] && echo "the job finished" || echo "the job ended with code $status" >&2
  return "$status"
}

case ${1:-run} in
  start) start ;;
  stop) stop ;;
  run)
    start
    submit
    ;;
  *) fail "'$1': give nothing, start or stop" ;;
esac

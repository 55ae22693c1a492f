#!/usr/bin/env bash
# Installs SLURM on this machine and runs the job of docs/scaling.md: two tasks of one run, on the CPU.
#
#   scripts/launch/slurm_one_machine.sh          installs and starts SLURM, submits the job, waits; returns the job's status
#   scripts/launch/slurm_one_machine.sh start    installs and starts SLURM only
#   scripts/launch/slurm_one_machine.sh stop     stops it and removes its files
#
# Debian or Ubuntu, as root, in a container or on a dedicated machine: it writes /etc/slurm/slurm.conf. It needs no
# systemd, cgroups or resolvable host name. `python` must have rlhf_jax. SLURM's state and logs are in
# RLHF_JAX_SLURM_DIR (default /tmp/rlhf_jax_slurm); the run folder is temporary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dir=${RLHF_JAX_SLURM_DIR:-/tmp/rlhf_jax_slurm}
conf=/etc/slurm/slurm.conf
mine="# written by rlhf_jax scripts/launch/slurm_one_machine.sh"

fail() { echo "slurm_one_machine: $*" >&2; exit 2; }

stop_daemon() { # PIDFILE: stops that daemon and waits for its end
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
    command -v apt-get >/dev/null || fail "no apt-get: install slurmctld, slurmd, srun and munge first"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends slurm-wlm munge
  fi
  if [ -f "$conf" ] && ! head -1 "$conf" | grep -qxF "$mine"; then
    fail "$conf exists and was not written by this script: submit scripts/launch/train.sbatch to the existing SLURM"
  fi
  stop
  install -d -m 755 "$dir" "$dir/state" "$dir/spool" "$(dirname "$conf")"

  # munge signs SLURM's messages: its own key, socket and log
  install -d -m 755 -o munge -g munge "$dir/munge"
  (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
  chown munge:munge "$dir/munge/key"
  su -s /bin/sh munge -c "munged --key-file=$dir/munge/key --socket=$dir/munge/socket --log-file=$dir/munge/log \
    --pid-file=$dir/munge/pid --seed-file=$dir/munge/seed"
  ln -s munge/pid "$dir/munged.pid"

  # Two tasks must fit, so SLURM is told of at least two CPUs. The node is named localhost, since jax's coordinator is the
  # first name in SLURM_STEP_NODELIST, which must resolve; slurmd -N sets that name.
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
    fail "the node did not start; the last lines of $dir/slurmctld.log and slurmd.log are above"
  fi
  echo "$(slurmctld -V) is running: $(sinfo --noheader --format='%n, %c CPUs, %t')"
}

submit() { # runs the command under <!-- slurm --> of docs/scaling.md in a temporary folder
  local command work status=0
  command=$(awk '/^<!-- slurm -->$/ {on = 1} on && /^sbatch/ {p = 1} p {print; if (!/\\$/) exit}' docs/scaling.md)
  [ -n "$command" ] || fail "docs/scaling.md has no command under <!-- slurm -->"
  export JAX_PLATFORMS=cpu PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
  python -c 'import rlhf_jax' || fail "\`python\` cannot import rlhf_jax: activate its environment, or set PATH"
  work=$(mktemp -d)
  ln -s "$PWD/scripts" "$work/scripts"
  echo "$command"
  (cd "$work" && SBATCH_WAIT=1 bash -c "$command") || status=$?
  cat "$work"/*.log
  # Only process 0 prints the stage; twice means two separate runs in one folder.
  if [ "$status" = 0 ] && ! { [ -f "$work"/runs/*/ppo/finished.json ] &&
    [ "$(cat "$work"/*.log | grep -ac '== ppo ->')" = 1 ]; }; then
    status=1
    echo "slurm_one_machine: sbatch returned 0, but this was not one run that finished" >&2
  fi
  rm -rf "$work"
  [ "$status" = 0 ] && echo "the job finished" || echo "the job exited with code $status" >&2
  return "$status"
}

case ${1:-run} in
  start) start ;;
  stop) stop ;;
  run)
    start
    submit
    ;;
  *) fail "'$1': give no argument, start or stop" ;;
esac

"""Kills runs at random moments, resumes them with the same command, and compares the results with uninterrupted runs.

    python scripts/chaos/chaos.py --kills 100
    python scripts/chaos/chaos.py --kills 20 --signal TERM --folder runs/chaos-term
    python scripts/chaos/chaos.py --kills 20 --processes 2 --folder runs/chaos-processes
    python scripts/chaos/chaos.py --kills 8 --resume_devices 2 --folder runs/chaos-mesh
    python scripts/chaos/chaos.py --kills 12 --adapters --folder runs/chaos-adapters
    python scripts/chaos/chaos.py --short

The runs are SFT, reward model, PPO, RLOO and GRPO with the quickstarts' models, a few updates each. A kill happens at a
random moment of a phase (compile, rollout, update, save, export), right before a file changes in that phase, or at a
random moment of the plain command. A resumed run may be killed again. The killed process is the command with
instrumentation (chaos_child.py); the one that finishes the run is the plain command. Weights, metrics.jsonl,
completions and the rest of the folder must equal those of the uninterrupted run byte for byte (chaos_compare.py lists
what is compared).

Each kill is a line of FOLDER/results.jsonl; rerun the command to resume the campaign. Exit code 1: a run ended
differently; its folder is kept in FOLDER/cases.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

import chaos_compare
import chaos_runs
from chaos_runs import SAVE_STEPS, UPDATES, Leg, Measured, Plan

STAGES = ("sft", "reward", "ppo", "rloo", "grpo")
MODELS_OF = {"sft": (), "reward": ("sft",), "ppo": ("sft", "reward"), "rloo": ("sft", "reward"), "grpo": ()}
PHASES = ("compile", "rollout", "update", "save", "export", "any")
SHARE_AFTER = 0.7  # fraction of kills after a first committed checkpoint
SHORT = {"kills": 5, "stages": ("sft", "rloo")}


class Campaign:
    """The uninterrupted runs, the kills so far, and the choice of the next one."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, options.folder.absolute()
        self.results = self.folder / "results.jsonl"
        self.kills = chaos_compare.lines_of(self.results)
        here = {name: getattr(options, name) for name in ("signal", "processes", "resume_devices", "adapters")}
        if any({name: kill.get(name, False) for name in here} != here for kill in self.kills):
            raise SystemExit(f"chaos: {self.folder} holds a campaign with other options; give another --folder")
        self.cases = 1 + max((kill["case"] for kill in self.kills), default=-1)
        self.measured: dict[str, Measured] = {}
        self.began, self.before = time.monotonic(), len(self.kills)

    # --- uninterrupted runs

    def prepare(self) -> None:
        """Writes configs and runs each stage twice without kills: instrumented for timings, plain for the comparison.

        Raises:
          SystemExit: the two runs differ, so that nothing can be compared.
        """
        (self.folder / "configs").mkdir(parents=True, exist_ok=True)
        texts = chaos_runs.configs(self.folder, self.options.short, self.options.adapters)
        needed = {*self.options.stages}
        for stage in () if self.options.short else self.options.stages:
            needed |= {*MODELS_OF[stage]}
        for stage in filter(needed.__contains__, STAGES):
            config = self.folder / f"configs/{stage}.json"
            whole = self.folder / "whole" / stage
            if not (whole / "measured.json").exists() or config.read_text(encoding="utf-8") != texts[stage]:
                chaos_runs.remove(whole)
                config.write_text(texts[stage], encoding="utf-8")
                self.measure(stage, whole)
            found = json.loads((whole / "measured.json").read_text(encoding="utf-8"))
            numbers = lambda of: {phase: {int(k): v for k, v in x.items()} for phase, x in of.items()}  # noqa: E731
            self.measured[stage] = Measured(**{**found, **{key: numbers(found[key]) for key in ("seconds", "files")}})

    def measure(self, stage: str, whole: pathlib.Path) -> None:
        """The two runs of a stage; the first compiles. --short uses only the first."""
        legs = [self.leg(stage, whole / "watched", watched=True)]
        for plain in [False] if self.options.short else [False, True]:
            legs += [self.leg(stage, whole)] if plain else []
            if wrong := legs[-1].ends() or any(legs[-1].codes):
                raise SystemExit(f"chaos: {stage} fails without a kill ({wrong}); see {whole}")
        watched, plain = legs[0], legs[-1]
        if plain is watched:
            (whole / "watched/run").rename(whole / "run")
        elif found := chaos_compare.differences(whole / "run", whole / "watched/run"):
            raise SystemExit(f"chaos: two uninterrupted runs of {stage} differ:\n  " + "\n  ".join(found))
        measured = Measured.of(watched.events, plain.seconds)
        if plain is watched:
            measured.wall -= sum(measured.seconds["compile"].values())
        (whole / "measured.json").write_text(json.dumps(vars(measured)), encoding="utf-8")
        chaos_runs.remove(whole / "watched")
        print(f"{stage}: {measured.wall:.0f} s uninterrupted, {watched.seconds:.0f} s with compiling", flush=True)

    def leg(self, stage: str, folder: pathlib.Path, cache: pathlib.Path | None = None, **options) -> Leg:
        """Starts a stage's run."""
        shared = {"processes": self.options.processes, "short": self.options.short, "how": self.options.signal}
        config = self.folder / f"configs/{stage}.json"
        return Leg(folder, config, cache or self.folder / "cache", **shared, **options)

    # --- choice of the next kill

    def next_plan(self, rng: random.Random, stage: str, committed: list[int], killed: int) -> Plan:
        """A kill in the phase with the fewest kills so far, at a random moment.

        Args:
          rng: random generator.
          stage: of the run.
          committed: steps of its checkpoints.
          killed: earlier kills of this run, which are not in the results yet.
        """
        measured, newest = self.measured[stage], max(committed, default=0)
        late = sum(bool(kill["committed"]) for kill in self.kills) < SHARE_AFTER * (len(self.kills) + killed + 1)
        possible = set(PHASES) & (measured.seconds.keys() | {"any"})
        if newest >= UPDATES:
            possible = {"export", "any"}
        elif late and not newest:
            possible.discard("compile")
        hit = collections.Counter(kill["phase"] for kill in self.kills)
        here = collections.Counter(kill["phase"] for kill in self.kills if kill["stage"] == stage)
        phase = min(sorted(possible), key=lambda name: (here[name] + hit[name] / len(STAGES), rng.random()))
        first = max(newest, SAVE_STEPS if late else 0) + 1
        if phase == "any":
            return Plan("any", wait=measured.wall * rng.uniform(0.5 if late and not newest else 0.0, 1.0))
        if phase == "compile":
            return self._while_compiling(rng, measured)
        if phase in ("rollout", "update"):
            # The first update of a process mostly loads compiled programs, which is not the wanted phase.
            number = rng.randint(min(max(first, newest + 2), UPDATES), UPDATES)
        elif phase == "save":
            number = rng.choice([step for step in range(SAVE_STEPS, UPDATES + 1, SAVE_STEPS) if step >= first])
        else:
            number = 1
        changes = measured.files.get(phase, {}).get(number)
        if changes and rng.random() < 0.5:
            return Plan(phase, number, file=rng.randint(1, changes))
        seconds = measured.seconds[phase]
        return Plan(phase, number, wait=rng.random() * seconds.get(number, max(seconds.values())))

    def _while_compiling(self, rng: random.Random, measured: Measured) -> Plan:
        """A random moment of the total compile time."""
        left = rng.random() * sum(measured.seconds["compile"].values())
        for number, seconds in measured.seconds["compile"].items():
            if left <= seconds:
                return Plan("compile", number, wait=left)
            left -= seconds
        return Plan("compile", 1)

    # --- a run, killed and resumed

    def case(self) -> list[dict]:
        """The kills of one run, with its outcome; empty if no signal reached it."""
        number, self.cases = self.cases, self.cases + 1
        rng = random.Random(f"{self.options.seed}/{number}")
        folder = self.folder / f"cases/{number}"
        chaos_runs.remove(folder)
        had = collections.Counter(kill["stage"] for kill in self.kills)
        stage = min(self.options.stages, key=lambda name: (had[name], rng.random()))
        kills, wrong, cache, began = [], None, None, time.monotonic()
        for _ in range(min(rng.choice((1, 1, 2, 2, 3)), self.options.kills - len(self.kills))):
            plan = self.next_plan(rng, stage, committed_in(folder / "run"), len(kills))
            if plan.phase == "compile":
                cache = folder / f"cache-{len(kills)}"
            victim = rng.randrange(self.options.processes)
            devices = self.options.resume_devices if kills else 1
            leg = self.leg(stage, folder, cache, plan=plan, victim=victim, devices=devices)
            wrong = leg.ends()
            met = leg.was_hit
            phase, when = leg.died_in(self.measured[stage]) if met else ("none", {})
            if not met:
                print(f"case {number} {stage}: finished before the signal in {plan.phase}", flush=True)
                wrong = wrong or (f"exit status {leg.codes} before the kill" if any(leg.codes) else None)
                break
            kills.append(
                {
                    **{"case": number, "stage": stage, "phase": phase, "asked": plan.phase, "when": when},
                    **{"committed": committed_in(folder / "run"), "leg": len(kills) + 1},
                    **{"victim": victim, "exit": leg.codes},
                }
            )
            if wrong:
                break
            if rng.random() < 2 / 3:
                cache = None  # else the next start uses the cache as the kill left it
        if not wrong:
            leg = self.leg(stage, folder, cache, devices=self.options.resume_devices if kills else 1)
            wrong = leg.ends() or (f"the resumed run exits with {leg.codes}" if any(leg.codes) else None)
        # SIGTERM triggers an extra checkpoint, so older checkpoints may differ; only the newest must be equal.
        how = {"another_mesh": self.options.resume_devices > 1, "other_checkpoints": self.options.signal == "TERM"}
        whole = self.folder / "whole" / stage / "run"
        found = [wrong] if wrong else chaos_compare.differences(whole, folder / "run", **how)
        ended = {"legs": len(kills) + 1, "identical": not found, "difference": found[:3]}
        if not kills and found:  # it failed before any kill
            kills = [{"case": number, "stage": stage, "phase": "none", "asked": "none", "committed": []}]
        seconds = round((time.monotonic() - began) / max(len(kills), 1), 1)
        if not found and not self.options.keep:
            chaos_runs.remove(folder)
        kind = {name: getattr(self.options, name) for name in ("processes", "resume_devices", "adapters")}
        return [{**kill, **ended, **kind, "signal": self.options.signal, "seconds": seconds} for kill in kills]

    def run(self) -> None:
        """Runs cases until --kills is reached."""
        while len(self.kills) < self.options.kills:
            fresh = self.case()
            with open(self.results, "a", encoding="utf-8") as file:
                file.write(
                    "".join(json.dumps(kill) + "\n" for kill in fresh)
                )  # one write: a case is complete or missing
            for kill in fresh:
                self.kills.append(kill)
                self.print_kill(kill)

    def print_kill(self, kill: dict) -> None:
        """Prints a line for a kill."""
        done = len(self.kills)
        each = (time.monotonic() - self.began) / max(done - self.before, 1)
        outcome = "identical" if kill["identical"] else f"DIFFERENT: {kill['difference'][0]}"
        where = " ".join(f"{name} {value}" for name, value in kill.get("when", {}).items())
        saved = f"after checkpoint {kill['committed'][-1]}" if kill["committed"] else "no checkpoint yet"
        left = each * max(self.options.kills - done, 0) / 60
        head = f"{done}/{self.options.kills} case {kill['case']} {kill['stage']:6} {kill['phase']:7} {where}, {saved}"
        print(f"{head}: {outcome} | {each:.0f} s/kill, {left:.0f} min left", flush=True)


def committed_in(run: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a run's folder."""
    if not (run / "checkpoints").is_dir():
        return []
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def table(kills: list[dict]) -> str:
    """Kills by phase and stage, how many came after a checkpoint, how many runs ended identically."""
    stages = [stage for stage in STAGES if any(kill["stage"] == stage for kill in kills)]
    phases = dict.fromkeys([*PHASES, *(kill["phase"] for kill in kills)])
    counts = collections.Counter((kill["phase"], kill["stage"]) for kill in kills)
    rows = [("phase", *stages, "all")]
    rows += [(p, *(counts[p, s] for s in stages), sum(counts[p, s] for s in stages)) for p in phases]
    rows.append(("all", *(sum(counts[p, s] for p in phases) for s in stages), len(kills)))
    lines = ["".join(f"{cell:>9}" for cell in row) for row in rows]
    after = sum(bool(kill["committed"]) for kill in kills)
    again = sum(kill.get("leg", 1) > 1 for kill in kills)
    identical = sum(kill["identical"] for kill in kills)
    lines.append(f"after a first checkpoint: {after}; of a resumed run: {again}")
    lines.append(f"identical: {identical} of {len(kills)}")
    for kill in kills:
        if not kill["identical"]:
            lines.append(f"  case {kill['case']} ({kill['stage']}, {kill['phase']}): {'; '.join(kill['difference'])}")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "total number, including those of an earlier campaign in --folder"
    parser.add_argument("--kills", type=int, default=100, help=text)
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL", help="signal of the kill")
    text = "processes of each run; one is killed, all are restarted"
    parser.add_argument("--processes", type=int, default=1, help=text)
    text = "devices after a kill; with more than 1, results agree to a tolerance"
    parser.add_argument("--resume_devices", type=int, default=1, help=text)
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated: sft, reward, ppo, rloo, grpo")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("runs/chaos"), help="folder of the campaign"
    )
    parser.add_argument("--adapters", action="store_true", help="train LoRA adapters")
    parser.add_argument("--keep", action="store_true", help="also keep the folders of identical runs")
    parser.add_argument("--short", action="store_true", help="5 kills of smaller models in a temporary folder")
    options = parser.parse_args(argv)
    options.stages = tuple(options.stages.split(","))
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"--stages {','.join(sorted(unknown))}: choose among {','.join(STAGES)}")
    if options.short:
        vars(options).update(SHORT, folder=pathlib.Path(tempfile.mkdtemp(prefix="chaos-")))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 1: a run ended differently."""
    options = parse(argv)
    campaign = Campaign(options)
    try:
        campaign.prepare()
        campaign.run()
    finally:
        if campaign.kills:
            print(table(campaign.kills), flush=True)
    failed = not all(kill["identical"] for kill in campaign.kills)
    if options.short and not failed:
        shutil.rmtree(options.folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""The mutation run (tests/mutation) on a sample, with controls: it kills faults of every kind, also those
that only cost time, and mutants that change nothing survive."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.conftest import needs_emulator
from tests.helpers import direct_launch
from tests.mutation import equivalents
from tests.mutation.__main__ import REQUIRED, all_mutants, report, sample
from tests.mutation.judge import Judge, Verdict, load_counts
from tests.mutation.operators import Key, Mutant, mutants_of
from tests.mutation.pool import verdicts
from tests.mutation.source import Source, kernel_sources
from tests.mutation.trial import Device, Trial
from tests.mutation.trials import all_trials

SAMPLE, SEED = 2, 4


@cache
def trials() -> dict[str, Trial]:
    return {trial.name: trial for trial in all_trials()}


def changed(file: str, old: str, new: str) -> Mutant:
    """A fault of our own: the one line of a file that has `old`."""
    source = next(source for source in kernel_sources() if source.name == file)
    (number,) = (n for n, line in enumerate(source.lines, start=1) if old in line)
    line = source.lines[number - 1]
    becomes = line.replace(old, new)
    return Mutant(Key(file, "", line.strip(), becomes.strip()), number, (becomes,))


@needs_emulator
@pytest.mark.parametrize("name", load_counts())
def test_a_trial_passes_within_its_counts(name: str) -> None:
    """Run `python -m tests.mutation --update-counts` after the kernels changed."""
    bounds = load_counts()[name]
    counts = trials()[name].run()
    higher = [what for what, count in counts.items() if count > bounds[what]]
    assert not higher, f"{', '.join(higher)} rose"
    if counts != bounds:
        warnings.warn(f"{name}: counts went down; update them", stacklevel=1)


@needs_emulator
def test_the_other_trials_pass() -> None:
    others = [trial for trial in trials().values() if trial.name not in load_counts()]
    assert others and not any(trial.counted for trial in others)
    for trial in others:
        trial.run()


@needs_emulator
def test_every_function_constant_is_on_in_a_trial() -> None:
    passes = [step for trial in trials().values() for step in trial.plan()["passes"]]
    off = [
        name for name in direct_launch.CONSTANTS if not any(step["constants"].get(name) for step in passes)
    ]
    assert not off, f"no trial of tests/mutation switches on {', '.join(off)}"


@needs_emulator
def test_trials_of_tensor_operations_run_on_them() -> None:
    """The planner leaves a call with too few rows to the other kernels."""
    of_tensors = [trial for trial in trials().values() if trial.device.tensor]
    elsewhere = [
        trial.name for trial in of_tensors if not any("tensor" in source for source in trial.kernels())
    ]
    assert of_tensors and not elsewhere


# A score modifier that calls can switch on: its constant, its parameter, and what it does.
MODIFIER = {
    "X(uint, slopes_kind)": "X(uint, slopes_kind) X(bool, doubled)",
    "X(fattn_f32, slope_scale)": "X(fattn_f32, slope_scale) X(fattn_f32, factor)",
    "modifiers.softcap = params.softcap;": "modifiers.softcap = fc_doubled ? params.factor : params.softcap;",
    "static_assert(sizeof(type) == bytes": "static_assert(sizeof(type) > 0",
    "if (fc_softcap) {": "if (fc_doubled) s *= 2.0f; if (fc_softcap) {",
}


@needs_emulator
@pytest.mark.parametrize("name", ["decode-window", "prefill-causal"])
def test_a_modifier_that_is_off_changes_no_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the result. Golden plans do not show it: tests/plan/test_golden.py."""
    place = direct_launch.CONSTANTS.index("slopes_kind") + 1
    before, behind = direct_launch.CONSTANTS[:place], direct_launch.CONSTANTS[place:]
    monkeypatch.setattr(direct_launch, "CONSTANTS", [*before, "doubled", *behind])
    kept = trials()[name]

    def mutate(text: str) -> str:
        for old, new in MODIFIER.items():
            assert text.count(old) == 1 or "scores.h" not in text, old
            text = text.replace(old, new)
        return text

    def counts(is_on: bool) -> dict[str, int]:
        def plan(_device: Device) -> dict[str, Any]:
            made = kept.plan()
            step = made["passes"][0]
            params = bytearray.fromhex(step["params_bytes"])
            offset, _ = direct_launch.INTERFACE["params"][direct_launch.PARAMS[step["kernel"]]]["slope_scale"]
            params[offset + 4 : offset + 4] = bytes(4)
            step["params_bytes"] = (params + bytes(4)).hex()
            step["constants"]["doubled"] = is_on
            return made

        return replace(kept, plan_for=plan).run(mutate)

    assert counts(False) == kept.run()
    with pytest.raises(AssertionError):
        counts(True)


@needs_emulator
def test_a_sample_is_killed() -> None:
    """The control: a mutant that is known to compute the same is a survivor until it is listed."""
    reasons = equivalents.load()
    same = next(key for key in reasons if key.file == "merge.metal" and "lane == 1" in key.becomes)
    mutants = {mutant.key: mutant for mutant in all_mutants()}
    chosen = sample([mutant for mutant in mutants.values() if mutant.key not in reasons], SAMPLE, SEED)
    found = {mutant.key: verdict for mutant, verdict in verdicts([mutants[same], *chosen], jobs=2)}
    assert len(found) == SAMPLE + 1
    text, score = report(found, reasons)
    assert score >= REQUIRED and "1 equivalent, 0 survived" in text, text
    text, score = report({same: found[same]}, {})
    assert text.startswith("survived: merge.metal fattn_merge") and score == 0


STEPS = "Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);"
TILE = "ranges = rows.ranges_of(tile.begin, kTileRows, *params);"
# For each mutant, a trial that it passes except for the counts.
SLOW = {
    "decode_loads_elements": (
        "decode-edges",
        changed("decode_step.h", "i, fc_vector_loads, at, keys[e]", "i, false, at, keys[e]"),
    ),
    "prefill_loads_elements": (
        "prefill-causal",
        changed("tile.h", "return fc_vector_loads ? *reinterpret_cast", "return false ? *reinterpret_cast"),
    ),
    "wide_loads_elements": (
        "wide-192",
        changed("columns.h", "at.pair, simdgroup), fc_vector_loads,", "at.pair, simdgroup), false,"),
    ),
    "decode_takes_no_step_as_whole": (
        "decode-whole-steps",
        changed("decode_rows.h", "return step.have_blocks() &", "return false &"),
    ),
    "wide_takes_no_step_as_whole": (
        "wide-window",
        changed("decode_rows.h", "return step.have_blocks() &", "return false &"),
    ),
    "prefill_takes_no_step_as_whole": (
        "prefill-causal",
        changed("steps.h", "unknown ? 0 : units_in(ranges.all_end, unit) * unit;", "0;"),
    ),
    "prefill_takes_no_cell_as_whole": (
        "prefill-map",
        changed(
            "prefill_tile.h", "steps.own_cell() == kWholeColumn &&", "steps.own_cell() == kHiddenColumn &&"
        ),
    ),
    "prefill_visits_what_the_map_hides": (
        "prefill-map",
        changed("mapped_steps.h", "const bool ahead = byte != kHiddenColumn &&", "const bool ahead ="),
    ),
    "decode_visits_what_no_row_sees": (
        "decode-window",
        changed(
            "decode.metal",
            f"const {STEPS}",
            f"{STEPS} steps.count += steps.gap.end - steps.gap.begin; steps.gap.end = steps.gap.begin;",
        ),
    ),
    "prefill_visits_what_no_row_sees": (
        "prefill-offset0",
        changed("prefill_tile.h", TILE, f"{TILE} ranges.end = rows.length;"),
    ),
    "wide_prefill_takes_no_step_as_whole": (
        "prefill-wide-192",
        changed(
            "prefill_tile.h",
            "own_ranges.all_see(key, key + 1) &&",
            "false && own_ranges.all_see(key, key + 1) &&",
        ),
    ),
    "merge_is_narrow": ("merge", changed("sizes.h", "= 4 * kSimdWidth", "= 1 * kSimdWidth")),
    "table_is_read_for_every_fragment": (
        "paged-64",
        changed("keys.h", "k > 0 && (fc_block_size % kTileKeys", "false && (fc_block_size % kTileKeys"),
    ),
    "latent_values_are_read_again": (
        "latent",
        changed("wide_step.h", "= kValueInKey ? kValueDim : 0;", "= 0;"),
    ),
    "scales_are_read_again": (
        "decode-int8",
        changed(
            "decode_step.h",
            "value_scale = sequence.value.row_scale(place,",
            "(void)*(const volatile device Scale*)sequence.value.scales_at(place, params.value_scales);"
            " value_scale = sequence.value.row_scale(place,",
        ),
    ),
}


@needs_emulator
@pytest.mark.parametrize("name", SLOW)
def test_a_fault_that_only_costs_time_is_killed_by_counts(name: str) -> None:
    """Counts are compared last, so the result was right."""
    trial, mutant = SLOW[name]
    assert Judge(only=(trial,)).judge(mutant).by == "counts"


@needs_emulator
@pytest.mark.parametrize(
    ("mutant", "by"),
    [
        (changed("part_sum.h", "simd_max(own.score)", "own.score"), "result"),
        (
            changed("merge.metal", "weight * shared_weighted[s *", "weight * shared_weighted[(s + 1) *"),
            "report",
        ),
        (
            changed(
                "merge.metal", "const float scale = params.puts_part", "const double scale = params.puts_part"
            ),
            "compiler",
        ),
    ],
)
def test_kills(mutant: Mutant, by: str) -> None:
    assert Judge(only=("merge",)).judge(mutant).by == by


def test_the_score() -> None:
    keys = [Key("a.h", "", "x", f"y{i}") for i in range(40)]
    found = {key: Verdict("survived" if i < 4 else "result") for i, key in enumerate(keys)}
    assert report(found, {})[1] == 0.9
    assert report(found, {keys[0]: "the same", keys[1]: "too"})[1] == 36 / 38


def test_no_entry_is_stale() -> None:
    mutants, reasons = all_mutants(), equivalents.load()
    assert not equivalents.stale(reasons, mutants)
    key = next(iter(reasons))
    for other in (replace(key, line=key.line + " "), replace(key, nth=9), replace(key, function="gone")):
        assert equivalents.stale([other], mutants) == [other]


def test_a_mutant_is_read_as_it_is_printed() -> None:
    for mutant in all_mutants():
        assert Key.of(str(mutant.key)) == mutant.key
    assert Key.of("a.h f (2): x | y => x & y") == Key("a.h", "f", "x | y", "x & y", 2)
    with pytest.raises(ValueError, match="a.h f x => y"):
        Key.of("a.h f x => y")


def test_an_entry_outlives_edits_of_other_lines() -> None:
    text = "inline int f(int n) {\n  return n + 1;\n}\n"
    before = {mutant.key for mutant in mutants_of(Source("a.h", text))}
    after = {mutant.key for mutant in mutants_of(Source("a.h", "// More.\nint x = 0;\n\n" + text))}
    assert before < after


LANGUAGE = """\
// a + b
#define TWICE(T) \\
  inline T twice(T n) { return n * 2; }
struct Pair {
  int values[kSize];
  bool operator<(int n) const thread { return values[n] < n && !fc_flag; }
};
static_assert(sizeof(Pair) == 8, "1 + 1");
template <int N>
inline int g(thread int (&run)[N], const device int* from [[buffer(3)]]) {
  for (int i = 0; i < N; i++) {
    run[i] = -min(from[i], 0x1f);
  }
  threadgroup_barrier(mem_flags::mem_none);
  return fc_flag ? clamp(run[0], 0, N) : 1.5f;
}
"""


def test_mutated_tokens() -> None:
    """Each operator and constant of code; no comment, string, attribute, assertion or template bracket."""
    becomes: dict[str, set[str]] = {}
    for mutant in mutants_of(Source("a.h", LANGUAGE)):
        becomes.setdefault(mutant.key.line, set()).add(mutant.key.becomes)
    assert becomes.pop("inline T twice(T n) { return n * 2; }") == {
        "inline T twice(T n) { return n / 2; }",
        "inline T twice(T n) { return n * 1; }",
        "inline T twice(T n) { return n * 3; }",
    }
    head, tail = "bool operator<(int n) const thread { return ", "; }"
    assert becomes.pop(f"{head}values[n] < n && !fc_flag{tail}") == {
        f"{head}{code}{tail}"
        for code in (
            "values[(n) + 1] < n && !fc_flag",
            "values[n] <= n && !fc_flag",
            "values[n] >= n && !fc_flag",
            "values[n] < n || !fc_flag",
            "values[n] < n && fc_flag",
        )
    }
    assert becomes.pop("for (int i = 0; i < N; i++) {") == {
        "for (int i = 1; i < N; i++) {",
        "for (int i = 0; i <= N; i++) {",
        "for (int i = 0; i >= N; i++) {",
        "for (int i = 0; i < N; i--) {",
    }
    assert becomes.pop("run[i] = -min(from[i], 0x1f);") == {
        ";",
        "run[(i) + 1] = -min(from[i], 0x1f);",
        "run[i] = min(from[i], 0x1f);",
        "run[i] = -max(from[i], 0x1f);",
        "run[i] = -min(from[(i) + 1], 0x1f);",
        "run[i] = -min(from[i], 0x1e);",
        "run[i] = -min(from[i], 0x20);",
    }
    assert becomes.pop("threadgroup_barrier(mem_flags::mem_none);") == {";"}
    assert becomes.pop("return fc_flag ? clamp(run[0], 0, N) : 1.5f;") == {
        "return !fc_flag ? clamp(run[0], 0, N) : 1.5f;",
        "return fc_flag ? (run[0]) : 1.5f;",
        "return fc_flag ? clamp(run[1], 0, N) : 1.5f;",
        "return fc_flag ? clamp(run[0], 1, N) : 1.5f;",
        "return fc_flag ? clamp(run[0], 0, N) : 2.5f;",
    }
    assert not becomes


def test_places() -> None:
    mutants = mutants_of(Source("a.h", LANGUAGE))
    assert {mutant.key.function for mutant in mutants} == {"twice", "Pair::operator<", "g"}

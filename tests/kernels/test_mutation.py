"""The mutation run (tests/mutation) on a sample, with controls: it kills faults of every kind, also those
that only cost time, and mutants that change nothing survive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import direct_launch
from tests.helpers.problems import Problem
from tests.mutation.__main__ import REQUIRED, all_mutants, report, sample
from tests.mutation.judge import SAME, Equivalent, Verdict, equivalents, is_equivalent, judge, verdicts
from tests.mutation.operators import Key, Mutant, mutants_of
from tests.mutation.source import Source, kernel_sources
from tests.mutation.trials import all_trials, of_problem

SAMPLE, SEED = 2, 4


def changed(file: str, old: str, new: str) -> Mutant:
    """A fault of our own: the one line of a file that has `old`."""
    source = next(source for source in kernel_sources() if source.name == file)
    (number,) = (n for n, line in enumerate(source.lines, start=1) if old in line)
    line = source.lines[number - 1]
    becomes = line.replace(old, new)
    return Mutant(Key(file, line.strip(), becomes.strip()), number, (becomes,))


@needs_emulator
def test_the_trials_reach_every_kernel_and_every_function_constant() -> None:
    passes = [step for trial in all_trials() for step in trial.plan["passes"]]
    assert {step["kernel"] for step in passes} == set(direct_launch.PARAMS)
    on = {name for step in passes for name, value in step["constants"].items() if value}
    off = set(direct_launch.CONSTANTS) - on
    assert not off, f"no trial of tests/mutation switches on {', '.join(sorted(off))}"


# A score modifier that calls can switch on: its constant, its parameter, and what it does.
MODIFIER = {
    "X(uint, slopes_kind)": "X(uint, slopes_kind) X(bool, doubled)",
    "X(fattn_f32, slope_scale)": "X(fattn_f32, slope_scale) X(fattn_f32, factor)",
    "modifiers.softcap = params.softcap;": "modifiers.softcap = fc_doubled ? params.factor : params.softcap;",
    "static_assert(sizeof(type) == bytes": "static_assert(sizeof(type) > 0",
    "if (fc_softcap) {": "if (fc_doubled) s *= 2.0f; if (fc_softcap) {",
}


@needs_emulator
@pytest.mark.parametrize(
    "problem",
    [
        Problem(0, "decode", torch.float16, 2, 2, 1, 2, 700, 64, 32, seq_lens=(530, 301), window_left=60),
        Problem(0, "prefill", torch.float16, 1, 4, 2, 80, 150, 64, 32, causality="bottom_right"),
    ],
    ids=str,
)
def test_a_modifier_that_is_off_changes_no_count(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the result. Golden plans do not show it: tests/plan/test_golden.py."""
    place = direct_launch.CONSTANTS.index("slopes_kind") + 1
    before, behind = direct_launch.CONSTANTS[:place], direct_launch.CONSTANTS[place:]
    monkeypatch.setattr(direct_launch, "CONSTANTS", [*before, "doubled", *behind])
    kept = of_problem(problem).run()

    def mutate(text: str) -> str:
        for old, new in MODIFIER.items():
            assert text.count(old) == 1 or "scores.h" not in text, old
            text = text.replace(old, new)
        return text

    def counts(is_on: bool) -> dict[str, int]:
        trial = of_problem(problem)
        step = trial.plan["passes"][0]
        params = bytearray.fromhex(step["params_bytes"])
        offset, _ = direct_launch.INTERFACE["params"][direct_launch.PARAMS[step["kernel"]]]["slope_scale"]
        params[offset + 4 : offset + 4] = bytes(4)
        step["params_bytes"] = (params + bytes(4)).hex()
        step["constants"]["doubled"] = is_on
        return trial.run(mutate)

    assert counts(False) == kept
    with pytest.raises(AssertionError):
        counts(True)


@needs_emulator
def test_a_sample_is_killed() -> None:
    """The controls: a mutant that is known to compute the same is a survivor until it is listed, and one of
    the same code is never killed."""
    mutants = all_mutants()
    of_merge = [mutant for mutant in mutants if mutant.key.file == "merge.metal"]
    listed = next(mutant for mutant in of_merge if is_equivalent(mutant.key))
    same = changed(
        "merge.metal",
        "threadgroup RowSum shared_keys[kSimdgroups];",
        "threadgroup RowSum shared_keys[0 + kSimdgroups];",
    )
    chosen = sample([mutant for mutant in mutants if not is_equivalent(mutant.key)], SAMPLE, SEED)
    found = {mutant.key: verdict for mutant, verdict in verdicts([listed, same, *chosen], jobs=2)}
    assert found[same.key].by == SAME and len(found) == SAMPLE + 2
    text, score = report(found)
    assert score >= REQUIRED and "1 equivalent, 0 survived" in text, text


STEPS = "Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);"
TILE = "ranges = rows.ranges_of(tile.begin, kTileRows, *params);"
# A kernel, and a mutant of it that gives right results.
SLOW = {
    "decode_loads_elements": (
        "decode",
        changed("decode_step.h", "i, fc_vector_loads, at, keys[e]", "i, false, at, keys[e]"),
    ),
    "prefill_loads_elements": (
        "prefill",
        changed("tile.h", "return fc_vector_loads ? *reinterpret_cast", "return false ? *reinterpret_cast"),
    ),
    "wide_loads_elements": (
        "decode_wide",
        changed("columns.h", "at.pair, simdgroup), fc_vector_loads,", "at.pair, simdgroup), false,"),
    ),
    "decode_takes_no_step_as_whole": (
        "decode",
        changed("decode_rows.h", "return step.have_blocks() &", "return false &"),
    ),
    "wide_takes_no_step_as_whole": (
        "decode_wide",
        changed("decode_rows.h", "return step.have_blocks() &", "return false &"),
    ),
    "prefill_takes_no_step_as_whole": (
        "prefill",
        changed("steps.h", "unknown ? 0 : units_in(ranges.all_end, unit) * unit;", "0;"),
    ),
    "prefill_takes_no_cell_as_whole": (
        "prefill",
        changed(
            "prefill_tile.h", "steps.own_cell() == kWholeColumn &&", "steps.own_cell() == kHiddenColumn &&"
        ),
    ),
    "prefill_visits_what_the_map_hides": (
        "prefill",
        changed("mapped_steps.h", "const bool ahead = byte != kHiddenColumn &&", "const bool ahead ="),
    ),
    "decode_visits_what_no_row_sees": (
        "decode",
        changed(
            "decode.metal",
            f"const {STEPS}",
            f"{STEPS} steps.count += steps.gap.end - steps.gap.begin; steps.gap.end = steps.gap.begin;",
        ),
    ),
    "prefill_visits_what_no_row_sees": (
        "prefill",
        changed("prefill_tile.h", TILE, f"{TILE} ranges.end = rows.length;"),
    ),
    "wide_prefill_takes_no_step_as_whole": (
        "prefill_wide",
        changed(
            "prefill_tile.h",
            "own_ranges.all_see(key, key + 1) &&",
            "false && own_ranges.all_see(key, key + 1) &&",
        ),
    ),
    "merge_is_narrow": ("merge", changed("sizes.h", "= 4 * kSimdWidth", "= 1 * kSimdWidth")),
    "table_is_read_for_every_fragment": (
        "decode",
        changed("keys.h", "k > 0 && (fc_block_size % kTileKeys", "false && (fc_block_size % kTileKeys"),
    ),
    "latent_values_are_read_again": (
        "decode_wide",
        changed("wide_step.h", "= kValueInKey ? kValueDim : 0;", "= 0;"),
    ),
    "scales_are_read_again": (
        "decode",
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
    kernel, mutant = SLOW[name]
    assert (
        judge(mutant, (trial for trial in all_trials() if trial.pipelines[0][0] == f"{kernel}.metal")).by
        == "counts"
    )


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
    of_merge = [trial for trial in all_trials() if trial.name.startswith("merge")]
    assert judge(mutant, of_merge).by == by


def test_the_score() -> None:
    keys = [Key("a.h", "x", f"y{i}") for i in range(40)]
    found = {key: Verdict("survived" if i < 4 else SAME if i < 8 else "result") for i, key in enumerate(keys)}
    text, score = report(found)
    assert score == 32 / 36 and text.startswith("survived: a.h: x => y0\n") and "4 with the same code" in text


def test_entries_of_equivalents() -> None:
    """Each stands for a mutant, or its reason must be checked again."""
    keys = [mutant.key for mutant in all_mutants()]
    stale = [entry for entry in equivalents() if not any(map(entry.covers, keys)) or not entry.reason]
    assert not stale, stale
    entry = Equivalent(("a.h", "b.h"), "lane == 0", "lane == 1", "all have it")
    key = Key("b.h", "if (x && lane == 0) {", "if (x && lane == 1) {")
    others = (
        replace(key, file="c.h"),
        replace(key, becomes="if (y && lane == 1) {"),
        replace(key, line="lane = 0"),
    )
    assert entry.covers(key) and not any(map(entry.covers, others))
    assert replace(entry, new="*").covers(others[1])


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

"""The mutation run (tests/mutation) on a sample, and its parts."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import direct_launch
from tests.mutation.__main__ import REQUIRED, report, sample
from tests.mutation.judge import SAME, SURVIVED, Verdict, judge, verdicts
from tests.mutation.operators import Key, all_mutants, changed, mutants_of
from tests.mutation.trial import of_merge
from tests.mutation.trials import all_trials

SAMPLE, SEED = 2, 4


@needs_emulator
def test_the_trials_reach_every_kernel_and_every_function_constant() -> None:
    left = {*direct_launch.PARAMS, *direct_launch.CONSTANTS}
    for trial in all_trials():
        for step in trial.plan["passes"]:
            left -= {step["kernel"], *(name for name, value in step["constants"].items() if value)}
        if not left:
            return
    pytest.fail(f"no trial of tests/mutation has {', '.join(sorted(left))}")


@needs_emulator
def test_a_sample_is_killed() -> None:
    mutants = sample(all_mutants(), SAMPLE, SEED)
    found = {mutant.key: verdict for mutant, verdict in verdicts(mutants, jobs=2)}
    text, score = report(found)
    assert len(found) == SAMPLE and score >= REQUIRED, text


@needs_emulator
@pytest.mark.parametrize(
    ("file", "old", "new", "by"),
    [
        ("part_sum.h", "simd_max(own.score)", "own.score", "result"),
        ("merge.metal", "weight * shared_weighted[s *", "weight * shared_weighted[(s + 1) *", "report"),
        ("merge.metal", "const float scale = params", "const double scale = params", "compiler"),
        ("sizes.h", "= 4 * kSimdWidth", "= 1 * kSimdWidth", "counts"),
        ("merge.metal", "if (lane == 0)", "if (lane == 1)", SURVIVED),
        ("merge.metal", "shared_keys[kSimdgroups]", "shared_keys[0 + kSimdgroups]", SAME),
    ],
)
def test_verdicts(file: str, old: str, new: str, by: str) -> None:
    assert judge(changed(file, old, new), [of_merge(torch.float32, 9, 200)]).by == by


def test_the_score() -> None:
    keys = [Key("a.h", "x", f"y{i}") for i in range(40)]
    found = {key: Verdict(SURVIVED if i < 4 else SAME if i < 8 else "result") for i, key in enumerate(keys)}
    text, score = report(found)
    assert score == 32 / 36 and text.startswith("survived: a.h: x => y0\n") and "4 of the same code" in text


def test_a_key_outlives_edits_of_other_lines() -> None:
    text = "inline int f(int n) {\n  return n + 1;\n}\n"
    before = {mutant.key for mutant in mutants_of("a.h", text)}
    after = {mutant.key for mutant in mutants_of("a.h", "// More.\nint x = 0;\n\n" + text)}
    assert before < after


# Lines, and what becomes of them.
LANGUAGE = {
    "// a + b": [],
    "#define TWICE(T) \\": [],
    "  inline T twice(T n) { return n * 2; }": ["n / 2", "n * 1", "n * 3"],
    "  int values[kSize * 2];": ["kSize / 2"],
    'static_assert(sizeof(Pair) == 8, "1 + 1");': [],
    "template <int N>": [],
    "int g(thread int (&run)[N], const device int* from [[buffer(3)]]) {": [],
    "  for (int i = 0; i < N; i++) {": ["i = 1;", "i <= N", "i >= N", "i--"],
    "    run[i] = -min(from[i], 0x1f);": [
        *("    ;", "run[(i) + 1]", "= min(", "-max(", "from[(i) + 1]", "0x1e", "0x20"),
    ],
    "  threadgroup_barrier(mem_flags::mem_none);": ["  ;"],
    "  if (run[0] == N) return;": ["(run[1] ==", "run[0] != N", "if (!(run[0] == N))"],
    "  return fc_flag ? clamp(run[0], 0, N) : 1.5f;": [
        *("!fc_flag ?", "fc_flag == false ?", "? (run[0]) :", "run[1]", "clamp(run[0], 1,", "2.5f"),
    ],
}


def test_mutated_lines() -> None:
    """Each operator and constant of code; no comment, string, attribute, assertion or template bracket."""
    becomes: dict[int, list[str]] = {}
    for mutant in mutants_of("a.h", "\n".join(LANGUAGE)):
        becomes.setdefault(mutant.first_line, []).append(mutant.lines[0])
    for number, (line, parts) in enumerate(LANGUAGE.items(), start=1):
        found = becomes.get(number, [])
        assert len(found) == len(parts), (line, found)
        for part in parts:
            assert [part in each for each in found].count(True) == 1 and part not in line, (part, found)

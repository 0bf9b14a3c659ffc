"""Wrong arguments: one sentence on standard error and exit status 2, before anything runs. Each has a similar
command that is accepted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import counted_launches
from tests.helpers.command_line import refusal_of, status_of
from tests.helpers.processes import run_python
from torch_fattn import __main__ as command_line
from torch_fattn import explain
from torch_fattn.commands import doctor
from torch_fattn.operators import OPERATORS

pytestmark = pytest.mark.host_only


SIZES = dict.fromkeys("batch heads kv-heads q-len kv-len head-dim value-dim cores".split(), "prefill")
SIZES |= {"block-size": "paged_decode", "parts": "merge", "prefix-len": "shared_prefix_decode"}


@pytest.mark.parametrize("option", SIZES)
def test_sizes(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    op = SIZES[option]
    for value in ("0", "-1", "-5", "1.5", "eight", "", "1e3", "99999999999999999999999"):
        message = refusal_of(command_line.main, ["explain", op, f"--{option}={value}"], capsys)
        assert f"--{option}" in message and value[:20] in message and "give" in message, message
    shape = ["--heads=8"] if op == "merge" else ["--heads=8", "--kv-len=64"]
    assert status_of(command_line.main, ["explain", op, *shape, f"--{option}=8"]) == 0


# Arguments of `explain` that are refused, words of the message, and arguments that are not.
EXPLAIN = """
gemm | 'gemm' (choose from 'prefill' | merge
prefill decode | unrecognized arguments: decode | prefill
prefill --core 8 | unrecognized arguments: --core | prefill --cores 8
prefill --caus | python -m torch_fattn explain --help lists | prefill --causal
prefill --torch 2 | explain: torch_version '2' is not | prefill --torch 2.15
prefill --macos x | explain: macos 'x' is not | prefill --macos 26.2
prefill --head-dim 60 | zeros to 64 | prefill --head-dim 64
decode --value-dim 60 | zeros to 64 | decode --value-dim 64
prefill --dtype int8 | --dtype: invalid choice: 'int8' | prefill --dtype float32
prefill --dtype | --dtype: expected one argument | prefill --dtype float32
decode --causal | decode has no option 'is_causal' | prefill --causal
decode --mask bool | mask 'bool' is of prefill, attention, sdpa, | prefill --mask bool
paged_decode --causal | paged_decode has no option 'is_causal' | paged_decode
varlen_prefill --block-size 8 | varlen_prefill takes no --block | varlen_prefill --causal
merge --kv-heads 4 | merge takes no --kv-heads | merge --heads 4
decode --block-size 16 | decode takes no --block-size | paged_decode --block-size 16
decode --parts 2 | decode takes no --parts | merge --parts 2
prefill --heads 6 --kv-heads 4 | 6 query heads cannot share 4 | prefill --heads 8 --kv-heads 4
prefill --head-dim 12 | multiple of 8 | prefill --head-dim 16
prefill --batch 2000000000 --heads 2000000000 | above 2^63 bytes | prefill --batch 20
prefill --family 0 | --family: '0' is below 1 | prefill --family 7
prefill --family 21 | --family: '21' is above 20 | prefill --family 10
prefill --device-name M3 | give family and cores | prefill --device-name M3 --family 9 --cores 10
prefill --device-name M3 --cores 10 | give family and cores | prefill --cores 10
merge --device-name M1 --family 9 --cores 8 | family 7, not 9 | merge --device-name M1 --family 7 --cores 8
merge --device-name= --family 9 --cores 8 | '' is not a printable | merge --device-name X --family 9 --cores 8
prefill --chip M9 | explain: chip 'M9' is not known; use one of M1, M1 Max | prefill --chip M2Max --cores 30
prefill --chip M1 --family 8 | give family 7 or another name | prefill --chip M1 --family 7
softmax --head-dim 8 | softmax takes no --head-dim | softmax --kv-len 8
sparse_decode --parts 2 | sparse_decode takes no --parts | sparse_decode --top-k 8
attention --prefix-len 8 | attention takes no --prefix-len | shared_prefix_decode --prefix-len 8
prefill --head-dim 580 | head_dim 580 is above 576 | prefill --head-dim 576
prefill --torch 2.13.0+ | '2.13.0+' is not a version | prefill --torch 2.14+local
prefill --macos 26.2+cpu | explain: macos '26.2+cpu' is not | prefill --macos 26.2
"""
REFUSED = [
    *(tuple(f"explain {arguments}" if n != 1 else arguments for n, arguments in enumerate(row.split(" | ")))
      for row in EXPLAIN.strip().splitlines()),
    ("", "required: command", "explain merge"),
    ("explian merge", "'explian'", "explain merge"),
    ("explain", "required: op", "explain merge"),
    ("doctor now", "unrecognized arguments: now", "explain merge"),
    ("doctor --verbose", "unrecognized arguments: --verbose", "explain merge"),
    ("doctor --foo", "python -m torch_fattn doctor --help lists", "explain merge"),
    ("explian", "(python -m torch_fattn --help lists", "explain merge"),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "message", "accepted"), REFUSED)
def test_explain_and_doctor(
    refused: str, message: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal_of(command_line.main, refused, capsys)
    assert status_of(command_line.main, accepted) == 0


@pytest.mark.parametrize(("value", "named"), [("off", True), ("0", False), ("1", False), ("", False)])
def test_doctor_names_an_invalid_switch(value: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATTN_TUNING", value)
    message = ["FATTN_TUNING is 'off', which counts as 1; set it to 0 or 1, or unset it"]
    assert doctor.advice_about_environment() == (message if named else [])


def test_an_unprintable_name(capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--family", "9", "--cores", "8", "--device-name"]
    assert "\\udcff" in refusal_of(command_line.main, ["explain", "merge", *device, "\udcff"], capsys)
    assert status_of(command_line.main, ["explain", "merge", *device, "M3 “new”"]) == 0


@pytest.mark.parametrize("op", (*OPERATORS, "mask_map", "cache_write", "rms_norm", "softmax"))
def test_a_plan_for_another_gpu_does_not_call_it_an_m1(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["--family", "9", "--cores", "40"]
    with counted_launches() as launches:
        assert status_of(command_line.main, ["explain", op, *other]) == 0
        text = capsys.readouterr().out
        assert status_of(command_line.main, ["explain", op, *other, "--json"]) == 0
    assert f"fattn.{op} on an Apple GPU (Apple family 9, 40 cores)" in text and not launches
    assert json.loads(capsys.readouterr().out)["passes"][0]["kernel"] in text
    assert status_of(command_line.main, ["explain", op]) == 0
    assert f"fattn.{op} on Apple M1 (Apple family 7, 8 cores)" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["prefill_backward", "varlen_prefill_backward"])
def test_the_plan_of_a_backward(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["explain", op, "--causal", "--heads", "32", "--kv-heads", "1", "--kv-len"]
    assert status_of(command_line.main, [*call, "200000"]) == 0
    message = capsys.readouterr().out
    assert "fattn_backward_query" in message and "fattn_backward_key" in message
    # The operands, lse, and the result in 32 bits.
    kept = 2 * 200000 * 128 * (32 + 1 + 1) + 4 * 200000 * 32 * (1 + 128)
    assert f"kept         {kept:,} bytes" in message
    assert "8000000 query rows of all heads that share keys are above 7812500" in refusal_of(
        command_line.main, [*call, "250000"], capsys
    )


@pytest.mark.parametrize("state", ["off", "registers"])
@pytest.mark.parametrize("name", ["Apple M6", "Apple M7 Pro", None])
def test_a_newer_chip_plans_like_the_newest_known_one(name: str | None, state: str) -> None:
    query = torch.empty(1, 8, 64, 64, dtype=torch.float16, device="meta")
    plans = [
        explain("prefill", query, query, query, device_name=name, family=family, cores=12, tensor=state)
        for family in (10, 11, 14)
    ]
    assert all(plan.passes == plans[0].passes and plan.route == plans[0].route for plan in plans)
    assert [re.findall(r"planned like .*", str(plan)) for plan in plans] == [
        [],
        ["planned like family 10 (M5)"],
        ["planned like family 10 (M5)"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --new-tokens 0", "--new-tokens: '0' is below 1"),
        ("demo --new-tokens -3", "--new-tokens: '-3' is below 1"),
        ("demo --new-tokens many", "--new-tokens: 'many' is not a whole number"),
        ("demo --dtype int8", "--dtype: invalid choice: 'int8'"),
        ("demo --modle x", "unrecognized arguments: --modle x"),
        ("demo --model=", "--model '' has no config.json"),
        ("demo --model /nonexistent", "'/nonexistent' has no config.json"),
        ("demo --model folder", "'folder' has no config.json"),
        ("demo --model folder/file", "'folder/file' has no config.json"),
        ("demo --model broken", "cannot be loaded as a causal language model"),
    ],
)
def test_demo(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """tests/commands/test_demo.py has the arguments that are accepted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch_fattn.commands.demo.advice_about_device", list)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[1]")
    assert message in refusal_of(command_line.main, arguments, capsys)


def test_demo_finds_out_first_that_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("")
    assert "results cannot be written" in refusal_of(command_line.main, "demo", capsys)


def test_a_reader_that_has_read_enough() -> None:
    """`explain ... | head -1`; the whole output is the control."""
    explained = ["-m", "torch_fattn", "explain", "decode", "--json"]
    whole = run_python(explained)
    assert whole.returncode == 0 and json.loads(whole.stdout) and not whole.stderr
    reader, writer = os.pipe()
    os.close(reader)
    cut = subprocess.run([sys.executable, *explained], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert cut.returncode == 1 and not cut.stderr

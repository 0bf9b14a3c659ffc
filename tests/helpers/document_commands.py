"""Every command of the documents, and how it is tested: it is run verbatim, another test covers it, or it is
not run, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Run verbatim by tests/docs/test_commands.py."""


@dataclass(frozen=True)
class ByTest:
    """Covered by another test, FILE::FUNCTION."""

    by: str


@dataclass(frozen=True)
class NotRun:
    why: str


Kind = Run | ByTest | NotRun

MAKE = NotRun("it makes the environment that the tests run in")
SUITE = NotRun("it runs these tests")
TUNE = NotRun("it times a GPU for three minutes; tests/commands/test_tune.py runs it with made-up times")
INSTALL = NotRun("it changes the environment that the tests run in; CI installs that way")
NVIDIA = NotRun("it needs nvcc or an NVIDIA GPU")
FETCHED = NotRun("it fetches what the tests do not need")
AGX = ByTest("softmetal/tests/agx/test_agx.py::test_the_command")
BENCH_AGX = ByTest("tests/bench/test_agx.py::test_the_command")
DOCTOR = ByTest("tests/commands/test_package.py::test_doctor_is_content")
_SERVE = "python -m torch_fattn.integrations.transformers serve MODEL --continuous-batching"
SERVE = ByTest("tests/transformers/test_serve_load.py::test_an_interrupt")
DEMO = ByTest("tests/commands/test_demo.py::test_tokens_agree")

# `python` is the interpreter that runs the tests.
COMMANDS: dict[str, Kind] = {
    _SERVE: SERVE,
    f"{_SERVE} --cb-num-blocks 1024": SERVE,
    "make build": MAKE,
    "make build DEBUG=1": ByTest("tests/project/test_setup.py::test_the_mode_of_make"),
    "make build SANITIZE=address": ByTest("tests/project/test_setup.py::test_the_mode_of_make"),
    "make compile-commands": ByTest("tests/project/test_setup.py::test_compile_commands"),
    "LD_PRELOAD=$(clang++-19 -print-file-name=libclang_rt.asan-x86_64.so) ASAN_OPTIONS=detect_leaks=0 "
    "pytest tests/operators/test_cpu.py": NotRun("it needs an extension built with the sanitizer"),
    "source .venv/bin/activate": MAKE,
    "make first-mac": ByTest("tests/project/test_first_mac.py::test_rehearsal"),
    "make demo": DEMO,
    "make demo MODEL=path": ByTest("tests/commands/test_demo.py::test_a_checkpoint_to_its_last_position"),
    "make check": SUITE,
    "make test": SUITE,
    "make test-all": SUITE,
    "make test-slow": SUITE,
    "make coverage": SUITE,
    "pip install pre-commit": FETCHED,
    "make test-newest": SUITE,
    "make wheel": INSTALL,
    "make check-wheel": INSTALL,
    "pip install ninja": INSTALL,
    "python -m build --sdist": INSTALL,
    "python -m build --no-isolation": INSTALL,
    "make lint": SUITE,
    "make format": NotRun("it rewrites the sources; make lint says whether it would"),
    "make mutants": NotRun("hours; tests/kernels/test_mutation.py runs a sample"),
    "make golden": NotRun("it rewrites tests/golden, which tests/plan/test_golden.py compares"),
    "make docs": ByTest("tests/docs/test_site.py::test_the_site_builds_without_a_warning"),
    "pip install --no-build-isolation -e softmetal": INSTALL,
    "pip install ./softmetal": INSTALL,
    "make -C softmetal test": SUITE,
    "make -C softmetal check-wheel": INSTALL,
    "pip install --no-build-isolation -e .": INSTALL,
    "pip install torch==2.13.0 --index-url <torch's CPU wheels>": INSTALL,
    "apt-get install clang-19 libclang-19-dev libclang-rt-19-dev llvm-19 llvm-19-dev libobjc-12-dev "
    "libblocksruntime-dev libgnustep-base-dev cmake ninja-build": INSTALL,
    "python -m softmetal build": MAKE,
    "make agx": FETCHED,
    "python -m softmetal build --agx": FETCHED,
    "python -m softmetal agx": AGX,
    "python -m softmetal agx kernels.metal --kernel multiply --threads 128 --constant wide=true": AGX,
    "python -m softmetal doctor": Run(),
    'eval "$(python -m softmetal config --env)"': Run(),
    "python -m softmetal corpus sources": ByTest(
        "softmetal/tests/test_arguments.py::test_a_corpus_and_its_file"
    ),
    "python -m softmetal.msl compile": NotRun("every dispatch of the tests compiles through it"),
    "python -m softmetal.msl serve SOCKET": ByTest(
        "softmetal/tests/framework/test_compiler.py::test_a_server_compiles_like_a_process"
    ),
    "python softmetal/tools/fetch_corpus.py sources": FETCHED,
    "python -m tests.third_party.run out/third_party-2.13.0 --markdown": FETCHED,
    "python -m pytest softmetal/tests": SUITE,
    "python -m torch_fattn doctor": DOCTOR,
    "python -m torch_fattn doctor --report": ByTest("tests/commands/test_report.py::test_the_report"),
    "python -m torch_fattn demo --dtype float16 --new-tokens 64": DEMO,
    "python -m torch_fattn explain paged_decode --batch 8 --heads 32 --kv-heads 8 --kv-len 4096 "
    '--chip "M3 Max" --verbose': Run(),
    "python -m torch_fattn explain prefill --heads 32 --kv-heads 8 --kv-len 1024 --causal --macos 15.6 "
    "--torch 2.15": Run(),
    "python -m torch_fattn explain prefill --heads 6 --kv-heads 4": Run(),
    "python -m torch_fattn explain decode --heads 32 --kv-heads 8 --kv-len 4096": Run(),
    "python -m torch_fattn tune": TUNE,
    "python -m torch_fattn tune --show": Run(),
    "python -m torch_fattn bench": NotRun("it takes minutes; the one below is the same for fewer calls"),
    "python -m torch_fattn bench --shapes qwen3-0.6b --op decode --peers --backend counts": Run(),
    "python -m torch_fattn bench --shapes all --json times.json --picture times": NotRun(
        "it times a Mac's GPU"
    ),
    "python examples/paged.py": ByTest("tests/docs/test_examples.py::test_paged"),
    "python examples/quantised.py": ByTest("tests/operators/test_quantised.py::test_the_example_runs"),
    "python examples/shared_prefix.py": ByTest("tests/docs/test_examples.py::test_shared_prefix"),
    "python examples/varlen.py": ByTest("tests/docs/test_examples.py::test_varlen"),
    "python examples/document_mask.py": ByTest("tests/docs/test_examples.py::test_document_mask"),
    "python examples/encoder.py": ByTest("tests/docs/test_examples.py::test_encoder"),
    "python examples/lora.py": ByTest("tests/docs/test_examples.py::test_lora"),
    "python -m tests.mutation --update-counts": NotRun(
        "it rewrites tests/mutation/counts.txt, which tests/kernels/test_mutation.py holds"
    ),
    "python -m tests.transformers.sweep": NotRun("an hour; tests/transformers/test_families.py runs a part"),
    "python -m bench bounds --update": NotRun(
        "it rewrites tests/kernels/counts_bounds.json, which test_counts.py holds"
    ),
    "python -m tests.docs.update_outputs": ByTest(
        "tests/docs/test_commands.py::test_an_output_is_written_anew"
    ),
    "python -m bench roofline": ByTest("tests/bench/test_apple_bounds.py::test_the_page_has_these_figures"),
    "python -m bench agx": BENCH_AGX,
    "python -m bench agx --update": BENCH_AGX,
    "python -m bench cuda-build": NVIDIA,
    "python -m bench cuda-build --shapes tensor": NVIDIA,
    "python -m bench --backend cuda --shapes tensor --json nvidia-h200-tensor.json": NVIDIA,
    "export TORCH_MACOS_WHEEL=torch-2.15.0-*-macosx_14_0_arm64.whl": NVIDIA,
    "python -m bench cuda-check": NVIDIA,
    "python -m tests.bench.cuda_problems": NVIDIA,
    "python -m tests.bench.cuda_problems --build": NVIDIA,
    "python -m bench --backend cuda --shapes standard decode prefill chunked --json nvidia-h200.json": NVIDIA,
    "compute-sanitizer --tool racecheck python -m bench cuda-check --small --reference cpu": NVIDIA,
    "pip download mlx-metal==0.32.4 --no-deps --only-binary=:all: --platform macosx_14_0_arm64": FETCHED,
    "pip download llama-cpp-python==0.3.36 --no-deps --no-binary=:all:": FETCHED,
    "export MLX_METAL_WHEEL=mlx_metal-0.32.4-*.whl LLAMA_CPP_SDIST=llama_cpp_python-0.3.36.tar.gz": NVIDIA,
    "export MLX_VJP_FOLDER=...": NVIDIA,
}

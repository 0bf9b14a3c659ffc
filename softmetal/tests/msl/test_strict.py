"""What Metal refuses is refused, with the line of the .metal source; beside every refused program stands an accepted sibling."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from softmetal.msl.compile import CompileError, Program, compile_program

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


@dataclass
class Rule:
    name: str
    refused: str  # the offending line ends in // HERE
    message: str
    accepted: str


RULES = [
    Rule(
        "device to threadgroup pointer",
        "kernel void k(device float* x [[buffer(0)]]) {\n  threadgroup float* p = x; // HERE\n  p[0] = 1;\n}",
        "cannot initialize a variable of type 'threadgroup float *'",
        "kernel void k(device float* x [[buffer(0)]]) {\n  device float* p = x;\n  p[0] = 1;\n}",
    ),
    Rule(
        "thread reference to device memory",
        "void f(thread float& x) { x = 1; }\nkernel void k(device float* x [[buffer(0)]]) {\n  f(x[0]); // HERE\n}",
        "no matching function for call to 'f'",
        "void f(device float& x) { x = 1; }\nkernel void k(device float* x [[buffer(0)]]) {\n  f(x[0]);\n}",
    ),
    Rule(
        "address spaces inside a template",
        "template <typename T>\nstruct Loader {\n  threadgroup T* to;\n  const device T* from;\n"
        "  void go() { to = from; } // HERE\n};\n"
        "kernel void k(device float* x [[buffer(0)]]) {\n  Loader<float> loader;\n  loader.from = x;\n  loader.go();\n}",
        "assigning 'const device float *'",
        "template <typename T>\nstruct Loader {\n  const device T* to;\n  const device T* from;\n  void go() { to = from; }\n};\n"
        "kernel void k(device float* x [[buffer(0)]]) {\n  Loader<float> loader;\n  loader.from = x;\n  loader.go();\n}",
    ),
    Rule(
        "write to constant memory",
        "kernel void k(constant float* x [[buffer(0)]]) {\n  x[0] = 1; // HERE\n}",
        "read-only",
        "kernel void k(device float* x [[buffer(0)]]) {\n  x[0] = 1;\n}",
    ),
    Rule(
        "C-style cast between address spaces",
        "kernel void k(device float* x [[buffer(0)]]) {\n  threadgroup int* p = (threadgroup int*)x; // HERE\n  p[0] = 1;\n}",
        "a cast cannot change the address space of a pointer",
        "kernel void k(device float* x [[buffer(0)]]) {\n  device int* p = (device int*)x;\n  p[0] = 1;\n}",
    ),
    Rule(
        "C-style cast of an expression",
        "kernel void k(device float* x [[buffer(0)]]) {\n  *(threadgroup int*)(x + 1) = 0; // HERE\n}",
        "a cast cannot change the address space of a pointer",
        "kernel void k(device float* x [[buffer(0)]]) {\n  *(device int*)(x + 1) = 0;\n}",
    ),
    Rule(
        "C-style cast that drops the address space",
        "kernel void k(device float* x [[buffer(0)]]) {\n  thread float* p = (thread float*)x; // HERE\n  p[0] = 1;\n}",
        "a cast cannot change the address space of a pointer",
        "kernel void k(device float* x [[buffer(0)]]) {\n  float y = 0;\n  thread float* p = (thread float*)&y;\n  x[0] = *p;\n}",
    ),
    Rule(
        "reinterpret_cast between address spaces",
        "kernel void k(device float* x [[buffer(0)]]) {\n  reinterpret_cast<threadgroup int*>(x)[0] = 1; // HERE\n}",
        "reinterpret_cast from 'device float *' to 'threadgroup int *' is not allowed",
        "kernel void k(device float* x [[buffer(0)]]) {\n  reinterpret_cast<device int*>(x)[0] = 1;\n}",
    ),
    Rule(
        "threadgroup variable outside of a kernel",
        "void f(device float* x) {\n  threadgroup float y[4]; // HERE\n  y[0] = x[0];\n}\n"
        "kernel void k(device float* x [[buffer(0)]]) { f(x); }",
        "must be declared in a kernel function",
        "void f(device float* x, threadgroup float* y) { y[0] = x[0]; }\n"
        "kernel void k(device float* x [[buffer(0)]]) {\n  threadgroup float y[4];\n  f(x, y);\n}",
    ),
    Rule(
        "threadgroup variable with an initialiser",
        "kernel void k(device float* x [[buffer(0)]]) {\n  threadgroup float y = 1; // HERE\n  x[0] = y;\n}",
        "cannot have an initialiser",
        "kernel void k(device float* x [[buffer(0)]]) {\n  threadgroup float y;\n  y = 1;\n  x[0] = y;\n}",
    ),
    Rule(
        "double",
        "kernel void k(device float* x [[buffer(0)]]) {\n  double y = x[0]; // HERE\n  x[0] = y;\n}",
        "no double",
        "kernel void k(device float* x [[buffer(0)]]) {\n  float y = x[0] * 2.0;\n  x[0] = y;\n}",
    ),
    Rule(
        "recursion",
        "int f(int n) { // HERE\n  return n < 2 ? n : f(n - 1) + f(n - 2);\n}\n"
        "kernel void k(device int* x [[buffer(0)]]) { x[0] = f(x[0]); }",
        "'f' calls itself",
        "template <int n> int f() { return f<n - 1>() + 1; }\ntemplate <> int f<0>() { return 0; }\n"
        "kernel void k(device int* x [[buffer(0)]]) { x[0] = f<4>(); }",
    ),
    Rule(
        "mutual recursion",
        "int g(int n);\nint f(int n) { return n < 1 ? 0 : g(n - 1); } // HERE\nint g(int n) { return f(n) + 1; }\n"
        "kernel void k(device int* x [[buffer(0)]]) { x[0] = f(x[0]); }",
        "'f' calls itself",
        "int f(float n) { return n; }\nint f(int n) { return f(float(n)); }\n"
        "kernel void k(device int* x [[buffer(0)]]) { x[0] = f(x[0]); }",
    ),
    Rule("standard header", "#include <vector> // HERE\n", "'vector' is no header of Metal", "#include <metal_math>\n"),
    Rule("C header", "#include <math.h> // HERE\n", "'math.h' is no header of Metal", "#include <simd/simd.h>\n"),
    Rule(
        "namespace std",
        "kernel void k(device float* x [[buffer(0)]]) {\n  x[0] = std::max(x[0], x[1]); // HERE\n}",
        "no namespace std",
        "kernel void k(device float* x [[buffer(0)]]) {\n  x[0] = metal::max(x[0], x[1]);\n}",
    ),
    Rule(
        "scalar parameter without attribute",
        "kernel void k(device float* x [[buffer(0)]],\n  uint i) { // HERE\n  x[i] = 1;\n}",
        "parameter 'i' of kernel 'k' (uint i) is neither a pointer nor a reference",
        "kernel void k(device float* x [[buffer(0)]],\n  uint i [[thread_position_in_grid]]) {\n  x[i] = 1;\n}",
    ),
    Rule(
        "vector parameter without attribute",
        "kernel void k(device float* x,\n  float4 v) { // HERE\n  x[0] = v.x;\n}",
        "parameter 'v' of kernel 'k'",
        "kernel void k(device float* x,\n  constant float4& v) {\n  x[0] = v.x;\n}",
    ),
    Rule(
        "signed thread position",
        "kernel void k(device float* x,\n  int i [[thread_position_in_grid]]) { // HERE\n  x[i] = 1;\n}",
        "must be uint or ushort",
        "kernel void k(device float* x,\n  ushort2 i [[thread_position_in_grid]]) {\n  x[i.x] = 1;\n}",
    ),
    Rule(
        "buffer index 31",
        "kernel void k(device float* x [[buffer(31)]]) { // HERE\n  x[0] = 1;\n}",
        "the largest is 30",
        "kernel void k(device float* x [[buffer(30)]]) {\n  x[0] = 1;\n}",
    ),
    Rule(
        "32 buffers",
        f"kernel void k({', '.join(f'device float* x{i}' for i in range(32))}) {{ // HERE\n  x0[0] = 1;\n}}",
        "the largest is 30",
        f"kernel void k({', '.join(f'device float* x{i}' for i in range(31))}) {{\n  x0[0] = 1;\n}}",
    ),
    Rule(
        "one buffer index twice",
        "kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) { // HERE\n  x[0] = y[0];\n}",
        "'x' and 'y' of kernel 'k' have the same buffer index",
        "kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(2)]]) {\n  x[0] = y[0];\n}",
    ),
    Rule(
        "kernel that returns a value",
        "kernel float k(device float* x [[buffer(0)]]) { // HERE\n  return x[0];\n}",
        "must return void",
        "kernel void k(device float* x [[buffer(0)]]) {\n  return;\n}",
    ),
    Rule(
        "kernel pointer without address space",
        "kernel void k(float* x [[buffer(0)]]) { // HERE\n  x[0] = 1;\n}",
        "needs an address space",
        "kernel void k(device float* x [[buffer(0)]]) {\n  x[0] = 1;\n}",
    ),
    Rule(
        "virtual function",
        "struct S {\n  virtual int f() { return 1; } // HERE\n};\n",
        "no virtual functions",
        "struct S {\n  int f() { return 1; }\n};\n",
    ),
    Rule(
        "exceptions",
        "void f() {\n  try { } // HERE\n  catch (int) { }\n}",
        "no exceptions",
        "void f() {\n  { }\n}",
    ),
    Rule("throw", "void f() {\n  throw 1; // HERE\n}", "no exceptions", "void f() {\n  return;\n}"),
    Rule(
        "new",
        "kernel void k(device int* x) {\n  thread int* p = new int; // HERE\n  x[0] = *p;\n}",
        "no new",
        "kernel void k(device int* x) {\n  int y = 1;\n  thread int* p = &y;\n  x[0] = *p;\n}",
    ),
    Rule("delete", "void f(thread int* p) {\n  delete p; // HERE\n}", "no delete", "struct S {\n  S() = delete;\n};"),
    Rule(
        "goto",
        "kernel void k(device int* x) {\n  goto end; // HERE\nend:\n  x[0] = 1;\n}",
        "no goto",
        "kernel void k(device int* x) {\n  x[0] = 1;\n}",
    ),
    Rule(
        "dynamic_cast",
        "struct S { int x; };\nvoid f(thread S* s) {\n  dynamic_cast<thread S*>(s); // HERE\n}",
        "run-time type",
        "struct S { int x; };\nvoid f(thread S* s) {\n  static_cast<thread S*>(s);\n}",
    ),
    Rule(
        "thread_local",
        "thread_local int x; // HERE\n",
        "no thread_local",
        "constant int x = 1;\n",
    ),
    Rule(
        "lambda",
        "kernel void k(device float* x) {\n  auto f = [](float y) { return y; }; // HERE\n  x[0] = f(1);\n}",
        "no lambda expressions",
        "struct F {\n  float operator()(float y) { return y; }\n};\nkernel void k(device float* x) {\n  F f;\n  x[0] = f(x[1]);\n}",
    ),
    Rule(
        "hexadecimal floating literal",
        "constant float x = 0x1p-3f; // HERE\n",
        "MSL 3.1 is C++14",
        "constant float x = 0.125f;\n",
    ),
    Rule(
        "structured binding",
        "struct P { int a, b; };\nint f(P p) {\n  auto [a, b] = p; // HERE\n  return a + b;\n}",
        "MSL 3.1 is C++14",
        "struct P { int a, b; };\nint f(P p) {\n  auto a = p.a;\n  return a + p.b;\n}",
    ),
    Rule(
        "fold expression",
        "template <typename... T> int f(T... x) {\n  return (x + ...); // HERE\n}",
        "MSL 3.1 is C++14",
        "template <typename... T> int f(T... x) {\n  return sizeof...(x);\n}",
    ),
    Rule(
        "class template argument deduction",
        "template <typename T> struct S { T x; S(T y) : x(y) {} };\nint f() {\n  S s(1); // HERE\n  return s.x;\n}",
        "template arguments",
        "template <typename T> struct S { T x; S(T y) : x(y) {} };\nint f() {\n  S<int> s(1);\n  return s.x;\n}",
    ),
    Rule(
        "variable length array",
        "kernel void k(device int* x) {\n  int y[x[0]]; // HERE\n  x[0] = y[0];\n}",
        "variable length arrays",
        "kernel void k(device int* x) {\n  int y[4];\n  x[0] = y[0];\n}",
    ),
    Rule(
        "program-scope variable",
        "int counter = 0; // HERE\n",
        "'counter' must reside in the constant address space",
        "constant int counter = 0;\n",
    ),
    Rule(
        "constexpr program-scope variable",
        "constexpr int n = 3; // HERE\n",
        "'n' must reside in the constant address space",
        "constexpr constant int n = 3;\n",
    ),
    Rule(
        "threadgroup variable at program scope",
        "threadgroup float x[4]; // HERE\n",
        "'x' must reside in the constant address space",
        "constant float x[4] = {1, 2, 3, 4};\n",
    ),
    Rule(
        "static local variable",
        "kernel void k(device int* x) {\n  static int n = 0; // HERE\n  x[0] = n;\n}",
        "'n' must reside in the constant address space",
        "kernel void k(device int* x) {\n  static constant int n = 0;\n  x[0] = n;\n}",
    ),
    Rule(
        "static member",
        "struct S {\n  static constexpr int n = 3; // HERE\n};\n",
        "'n' must reside in the constant address space",
        "struct S {\n  static constexpr constant int n = 3;\n  int m;\n};\n",
    ),
    Rule(
        "parameter pointer without address space",
        "float f(const float* x) { return x[0]; } // HERE\n",
        "the pointer type 'const float*' needs an address space",
        "float f(const device float* x) { return x[0]; }\n",
    ),
    Rule(
        "parameter reference without address space",
        "template <typename T> void f(int i, T& x) { x = i; } // HERE\n",
        "the reference type 'T&' needs an address space",
        "template <typename T> void f(int i, thread T& x) { x = i * sizeof(T) & i; }\n",
    ),
    Rule(
        "local pointer without address space",
        "kernel void k(device float4* x) {\n  float4* p = x; // HERE\n  p[0] = 1;\n}",
        "needs an address space",
        "kernel void k(device float4* x) {\n  auto p = x;\n  p[0] = x[0] * x[1];\n}",
    ),
    Rule(
        "auto reference without address space",
        "kernel void k(device float4* x) {\n  auto& p = x[0]; // HERE\n  p = 1;\n}",
        "needs an address space",
        "kernel void k(device float4* x) {\n  device auto& p = x[0];\n  p = 1;\n}",
    ),
    Rule(
        "member pointer without address space",
        "struct S {\n  float* x; // HERE\n};\n",
        "needs an address space",
        "struct S {\n  device float* x;\n};\n",
    ),
    Rule(
        "cast to a pointer without address space",
        "kernel void k(device float* x) {\n  *(int*)x = 1; // HERE\n}",
        "needs an address space",
        "kernel void k(device float* x) {\n  *(device int*)x = 1;\n}",
    ),
    Rule(
        "function of the C library that Metal does not have",
        "kernel void k(device float* x) {\n  x[0] = log1p(x[1]); // HERE\n}",
        "undeclared identifier 'log1p'",
        "kernel void k(device float* x) {\n  x[0] = log(1 + x[1]);\n}",
    ),
    Rule(
        "simdgroup_load of another type",
        "#include <metal_simdgroup_matrix>\nkernel void k(device half* x) {\n  simdgroup_float8x8 m;\n"
        "  simdgroup_load(m, x, 8); // HERE\n}",
        "element type",
        "#include <metal_simdgroup_matrix>\nkernel void k(device half* x) {\n  simdgroup_half8x8 m;\n"
        "  simdgroup_load(m, x, 8);\n}",
    ),
    Rule(
        "ambiguous types of max",
        "kernel void k(device float* x, constant int& n) {\n  x[0] = max(x[0], n); // HERE\n}",
        "ambiguous",
        "kernel void k(device float* x, constant int& n) {\n  x[0] = max(x[0], float(n));\n}",
    ),
    Rule(
        "implicit conversion of vectors",
        "kernel void k(device float4* x, device half4* y) {\n  y[0] = x[0]; // HERE\n}",
        "half4",
        "kernel void k(device float4* x, device half4* y) {\n  y[0] = half4(x[0]);\n}",
    ),
]


def refusal(source: str, tmp_path) -> str:
    with pytest.raises(CompileError) as caught:
        compile_program(Program(source, name="test.metal"), "fast", tmp_path)
    return str(caught.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_refused_with_its_line(rule: Rule, tmp_path) -> None:
    source = PRELUDE + rule.refused
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "// HERE" in text)
    message = refusal(source, tmp_path)
    assert rule.message in message
    assert f"test.metal:{line}: error:" in message


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_accepted_sibling(rule: Rule, tmp_path) -> None:
    assert compile_program(Program(PRELUDE + rule.accepted, name="test.metal"), "fast", tmp_path).exists()


def test_line_directives_name_the_place(tmp_path) -> None:
    message = refusal('#line 41 "tile.h"\n\nconstant int x = y;\n', tmp_path)
    assert message.startswith("tile.h:42: error:")


def test_host_library_does_not_show_in_messages(tmp_path) -> None:
    message = refusal(PRELUDE + "kernel void k(device float3* x) { x[0] = float3(1.0f, 2.0f); }", tmp_path)
    assert "test.metal:3" in message and "vectors.h" not in message

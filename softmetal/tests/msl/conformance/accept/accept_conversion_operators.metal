// certain: conversion operators in every address space (MLX complex64_t)
#include <metal_stdlib>
using namespace metal;
struct C {
  float r;
  constexpr operator float() const thread { return r; }
  constexpr operator float() const threadgroup { return r; }
  constexpr operator float() const device { return r; }
  constexpr operator float() const constant { return r; }
};
kernel void k(device C* d [[buffer(0)]], constant C& c [[buffer(1)]], device float* x [[buffer(2)]]) {
  C l = d[0];
  x[0] = float(d[0]) + float(c) + float(l);
}

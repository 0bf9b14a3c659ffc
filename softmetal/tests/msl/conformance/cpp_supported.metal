// Features of C++ that Metal has, and extensions that it accepts. The format of this file: ../catalogue.py

// --- lambda_with_captures | accepted (certain, metal3.2) | MSL 3.2, 1.5.4 | MSL 3.2 has lambda expressions.
kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float s = 3;
  auto f = [&](float x) { return x * s; };
  auto g = [=](float x) { return x + s; };
  o[i] = f(2) + g(1);
}
// --- lambda_reading_a_buffer | accepted
kernel void k(device int* x [[buffer(0)]]) {
  auto f = [&](int a) { return a + x[1]; };
  x[0] = f(1);
}

// --- cpp17_in_40 | accepted (likely, metal4.0) | MSL 4.0, what is new | MSL 4.0 has C++17: structured bindings, if with an initialiser, deduced class arguments.
template <typename T>
struct P {
  T a, b;
  P(T x, T y) : a(x), b(y) {}
};
kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  P p(1.0f, 2.0f);
  auto [x, y] = p;
  if (float z = x + y; z > 2) o[i] = z;
}

// --- enumerations_and_unions | accepted (certain) | MSL 1.5: C++14 | Metal has enumerations, scoped ones too, and switch.
enum Mode : uchar { kA, kB = 4 };
enum class Op : uint { add = 1, mul };
union U {
  uint u;
  float f;
  half2 h;
};
kernel void k(device uint* o [[buffer(0)]], constant Mode& m [[buffer(1)]], constant Op& p [[buffer(2)]]) {
  U u;
  u.f = 2;
  switch (p) {
    case Op::add:
      o[0] = u.u;
      break;
    case Op::mul:
      o[1] = m;
      break;
  }
  o[2] = static_cast<uint>(p) + (m == kB);
}

// --- bit_fields | accepted (likely) | MSL 1.5: C++14 | Metal has bit fields.
struct B {
  uint a : 4;
  uint b : 28;
};
kernel void k(device uint* o [[buffer(0)]]) {
  B b;
  b.a = 3;
  b.b = 4;
  o[0] = b.a + b.b;
}

// --- range_for | accepted (likely) | MSL 1.5: C++14 | Range-based for works on local arrays.
kernel void k(device float* o [[buffer(0)]]) {
  float a[3] = {1, 2, 3};
  float s = 0;
  for (float x : a) s += x;
  o[0] = s;
}

// --- returned_auto | accepted (certain) | MSL 1.5: C++14 | A return type can be deduced.
template <typename T> auto f(T a) { return a*2; }
kernel void k(device float* x [[buffer(0)]]) { auto y=f(x[0]); x[0]=y; }

// --- local_struct_statics | accepted (likely) | C++ [class.local] | A local struct can have static member functions.
kernel void k(device int* o [[buffer(0)]]) {
  struct S {
    int x;
    static int f(int y) { return y + 1; }
    static constexpr int g() { return 3; }
    int h() const { return f(x); }
  };
  static constant int n = 2;
  S s = {o[1]};
  o[0] = S::f(n) + S::g() + s.h();
}

// --- fold_expression | accepted (likely) | clang warns only | Fold expressions (C++17) are accepted.
template <typename... T> int f(T... x) { return (x + ...); }
kernel void k(device int* x [[buffer(0)]]) { x[0]=f(1,2); }

// --- hexadecimal_float | accepted (policy) | clang takes it as an extension | Hexadecimal floating literals (C++17) are accepted.
kernel void k(device float* x [[buffer(0)]]) { x[0]=0x1p-3f; }

// --- designated_initialisers | accepted (likely) | Rive's shaders; clang warns only | Designated initialisers (C++20) are accepted.
struct S { int a; float b; };
kernel void k(device int* x [[buffer(0)]]) { S s = {.a=1, .b=2.0f}; x[0]=s.a; }

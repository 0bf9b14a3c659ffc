// Member functions qualified with an address space. The format of this file: ../catalogue.py

// --- setup
struct S {
  float a;
  float get() const { return a; }
  float operator()(float b) const { return a * b; }
  float of_device() const device { return a; }
};
constant S program = {1.0f};
kernel void k(device S* d, constant S& c, threadgroup S& t [[threadgroup(0)]], device float* x) {
  S own = {2.0f};

// --- calls | rejected (certain) | MSL 4; -Wmetal-addr-spaces, MLX PR 3963, MLX steel/attn, ogre-next #323 | A member function can be called on objects in its own address space only.
  x[0] = d->get();  // error
  x[0] = c.get();  // error
  x[0] = program.get();  // error
  x[0] = t(2.0f);  // error
  x[0] = t.of_device();  // error
  x[0] = d->of_device() + own.get() + own(2.0f);  // accepted

// --- device_member_on_thread | rejected (likely) | MSL 4 | A member function qualified `device` cannot be called on a thread object.
  x[0] = own.of_device();  // error

// --- device_member_returns_thread_reference | rejected (certain) | MSL 4; MLX steel/attn | `this` in a member function qualified `device` points to device memory.
struct View {
  float v[4];
  thread float& at(uint i) device { return v[i]; }  // error
};
kernel void k(device View* b [[buffer(0)]], uint i [[thread_position_in_grid]]) { b[i].at(1) = 1; }

// --- device_this | accepted (certain) | MSL 4; MLX steel/attn | `this` in a member function qualified `device` is a device pointer.
struct Node {
  int next;
  int value;
  int sum(device const Node* base) const device {
    device const Node* n = this;
    int s = 0;
    while (n->next >= 0) {
      s += n->value;
      n = base + n->next;
    }
    return s;
  }
};
kernel void k(device const Node* n [[buffer(0)]], device int* o [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  o[i] = n[i].sum(n);
}

// --- hidden_members | accepted (certain) | MSL 4; MLX steel/attn | Parameters and local variables hide data members in a qualified member function.
struct S {
  float a, b;
  int n[3];
  thread float* p;
  float f(float a) device {
    float b = a + this->b;
    {
      int n = 2;
      b += n;
    }
    return b + this->n[1];
  }
  void g() device {
    a = 1;
    n[0] += 2;
    f(3);
  }
};
kernel void k(device S* o [[buffer(0)]]) { o[0].g(); }

// --- conversion_operators | accepted (certain) | MLX complex64_t | Conversion operators can be qualified with every address space.
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

// --- unqualified_returns_thread_reference | accepted (certain) | MLX PR 3963 | Before MSL 4.1, `this` of an unqualified member function points to thread memory.
struct S {
  float v[4];
  thread float& at(int i) {
    return v[i];
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.at(0) = 1; x[0] = s.at(0); }

// --- qualified_member_on_temporary | rejected (unsure) | no public Metal source has it | A member function qualified with an address space cannot be called on a temporary.
struct S { float x; float f() const thread { return x; } };  // rejected
struct S { float x; float f() const thread { return x; } float operator()(float y) const thread { return x + y; } };  // accepted
S made(float x) { return {x}; }
struct Op { template <typename T> T operator()(T x) thread { return x; } };  // accepted
kernel void k(device float* o) {
  o[0] = made(o[1]).f();  // error: a call of the member function 'f', which is qualified with an address space, on a temporary
  const S s = made(o[1]);  // accepted
  o[0] = s.f() + made(o[2])(1) + Op()(o[3]);  // accepted
}

// --- temporary_as_thread_reference | rejected (unsure) | no public Metal source has it | A temporary object does not bind to a const thread reference parameter.
struct S { float x; };
S made(float x) { return {x}; }
float f(thread const S& s) { return s.x; }
float g(S s) { return s.x; }  // accepted
kernel void k(device float* o) {
  o[0] = f(made(o[1]));  // error: a reference (parameter 's' of 'f') to a temporary object
  const S s = made(o[1]);  // accepted
  o[0] = f(s) + g(made(o[2])) + max(made(o[3]).x, 1.0f);  // accepted
}

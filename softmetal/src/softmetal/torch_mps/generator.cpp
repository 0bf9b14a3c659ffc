// MPS generators.
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace softmetal {
namespace {

struct MpsGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  MpsGenerator() : MpsGenerator(at::detail::createCPUGenerator()) {}
  explicit MpsGenerator(at::Generator host)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::MPS, 0), c10::DispatchKeySet(c10::DispatchKey::MPS)),
        cpu(std::move(host)) {}
  static c10::DeviceType device_type() { return c10::DeviceType::MPS; }

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "an mps generator of softmetal has no offset to set");
  }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override { return new MpsGenerator(cpu.clone()); }
};

}  // namespace

const at::Generator& default_generator() {
  static const at::Generator generator = new_generator();
  return generator;
}
at::Generator new_generator() { return at::make_generator<MpsGenerator>(); }
at::Generator host_generator(const at::Generator& generator) {
  if (generator.device().type() != c10::DeviceType::MPS) return generator;
  return static_cast<MpsGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace softmetal

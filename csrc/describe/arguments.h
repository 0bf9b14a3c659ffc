// Access to arguments by name, for calls on the dispatcher's stack and calls that this library makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>

namespace fattn {

// The dispatcher cannot check a boxed kernel against the schema. Instead, reading a name that the schema
// lacks raises an error, and check_all_read() finds arguments that the kernel never reads.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : schema_(op.schema()), values_(torch::jit::last(stack, op.schema().arguments().size())) {}

  bool has(std::string_view name) const { return index_of(name) < values_.size(); }
  const c10::IValue& operator[](std::string_view name) const {
    const size_t index = index_of(name);
    TORCH_INTERNAL_ASSERT(index < values_.size(), schema_.name(), " has no argument ", name);
    return values_[index];
  }
  const at::Tensor& tensor(std::string_view name) const { return (*this)[name].toTensor(); }
  std::optional<at::Tensor> optional_tensor(std::string_view name) const {
    const c10::IValue& value = (*this)[name];
    return value.isNone() ? std::nullopt : std::optional(value.toTensor());
  }
  template <typename T>
  T get(std::string_view name) const {
    return (*this)[name].to<T>();
  }
  // Valid as long as the stack.
  std::string_view text(std::string_view name) const { return (*this)[name].toStringView(); }
  void check_all_read() const {
    for (size_t i = 0; i < values_.size(); ++i) {
      TORCH_INTERNAL_ASSERT(read_ >> i & 1, schema_.name(), " does not read ", schema_.arguments()[i].name());
    }
  }

 private:
  // Kernels read arguments roughly in the order of the schema, so the search begins after the last one.
  size_t index_of(std::string_view name) const {
    const auto& arguments = schema_.arguments();
    const size_t count = arguments.size();
    for (size_t step = 0; step < count; ++step) {
      const size_t index = next_ + step < count ? next_ + step : next_ + step - count;
      if (arguments[index].name() == name) {
        next_ = index + 1;
        read_ |= uint64_t{1} << index;
        return index;
      }
    }
    return count;
  }

  const c10::FunctionSchema& schema_;
  at::ArrayRef<c10::IValue> values_;
  mutable size_t next_ = 0;
  mutable uint64_t read_ = 0;  // a bit for each argument
};

// A call of an op with some of its arguments; the others have the schema's defaults.
class Invocation {
 public:
  explicit Invocation(const c10::OperatorHandle& op) : op_(op) {
    const auto& arguments = op.schema().arguments();
    stack_.reserve(arguments.size());
    for (const c10::Argument& argument : arguments) {
      const std::optional<c10::IValue>& value = argument.default_value();
      stack_.push_back(value ? *value : c10::IValue());
    }
  }

  Invocation& set(const char* name, c10::IValue value) {
    const std::optional<int> index = op_.schema().argumentIndexWithName(name);
    TORCH_INTERNAL_ASSERT(index, op_.schema().name(), " has no argument ", name);
    stack_[static_cast<size_t>(*index)] = std::move(value);
    return *this;
  }

  Arguments arguments() const { return {op_, stack_}; }

  // Returns the results.
  torch::jit::Stack call() && {
    op_.callBoxed(&stack_);
    return std::move(stack_);
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack stack_;
};

}  // namespace fattn
